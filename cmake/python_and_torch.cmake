# Finds Python, pybind11 and torch, each with a message that says what is missing. torch is found without importing it
# (0.02 s instead of 2 s at each configure) and without its own CMake files, which ask for more than the stable ABI needs.

find_package(Python COMPONENTS Interpreter)
if(NOT Python_Interpreter_FOUND)
  message(FATAL_ERROR "tinyserve_ops needs Python 3.10 or newer; no interpreter was found.")
elseif(Python_VERSION VERSION_LESS 3.10)
  message(FATAL_ERROR "tinyserve_ops needs Python 3.10 or newer; found ${Python_VERSION} (${Python_EXECUTABLE}). "
    "Choose another with -DPython_EXECUTABLE=/path/to/python.")
endif()
find_package(Python COMPONENTS Interpreter Development.Module)
if(NOT Python_Development.Module_FOUND)
  message(FATAL_ERROR "The headers of Python ${Python_VERSION} are missing (Debian and Ubuntu: apt-get install python3-dev).")
endif()

function(tinyserve_ask_python var code)
  execute_process(COMMAND ${Python_EXECUTABLE} -c "${code}"
    OUTPUT_VARIABLE answer OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  set(${var} "${answer}" PARENT_SCOPE)
endfunction()

tinyserve_ask_python(torch_dir
  "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')")
tinyserve_ask_python(torch_version "import importlib.metadata as m; print(m.version('torch'))")
if(NOT torch_dir)
  message(FATAL_ERROR "torch is not installed for ${Python_EXECUTABLE}. Install it first (pip install 'torch>=2.11'), then "
    "build with `pip install --no-build-isolation .`: an isolated build does not see the installed torch.")
elseif(torch_version VERSION_LESS 2.11)
  message(FATAL_ERROR "tinyserve_ops needs torch 2.11 or newer; found ${torch_version} (${torch_dir}).")
endif()
message(STATUS "torch ${torch_version}: ${torch_dir}")

# The operators use the stable ABI of torch 2.11: one build loads in every later torch. The link to libtorch_cpu is
# needed although torch is already loaded, because torch opens its libraries with local symbols.
add_library(tinyserve_torch INTERFACE)
target_compile_definitions(tinyserve_torch INTERFACE TORCH_TARGET_VERSION=0x020b000000000000)
target_include_directories(tinyserve_torch SYSTEM INTERFACE ${torch_dir}/include)
find_library(TINYSERVE_TORCH_CPU torch_cpu PATHS ${torch_dir}/lib NO_DEFAULT_PATH NO_CACHE REQUIRED)
target_link_libraries(tinyserve_torch INTERFACE ${TINYSERVE_TORCH_CPU})
# No path to torch in our files: torch's libraries are found by name once torch is imported.
set(CMAKE_INSTALL_RPATH_USE_LINK_PATH OFF)

tinyserve_ask_python(pybind11_dir "import pybind11; print(pybind11.get_cmake_dir())")
if(NOT pybind11_dir)
  message(FATAL_ERROR "pybind11 is not installed for ${Python_EXECUTABLE} (pip install 'pybind11>=3,<4').")
endif()
set(PYBIND11_FINDPYTHON ON)
find_package(pybind11 3 CONFIG REQUIRED PATHS ${pybind11_dir} NO_DEFAULT_PATH)

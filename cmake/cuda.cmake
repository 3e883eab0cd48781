# Decides whether the CUDA kernels are built (TINYSERVE_CUDA=AUTO|ON|OFF), enables the language and sets the
# architectures: sm_80 and sm_90 code, plus PTX for what comes later. Sets TINYSERVE_CUDA_ENABLED.

string(TOUPPER "${TINYSERVE_CUDA}" wish)
if(NOT wish MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "TINYSERVE_CUDA must be AUTO, ON or OFF; got '${TINYSERVE_CUDA}'.")
endif()
set(TINYSERVE_CUDA_ENABLED OFF)
if(wish STREQUAL "AUTO" AND NOT EXISTS /dev/nvidiactl)
  message(STATUS "CUDA kernels: not built (no GPU is visible; TINYSERVE_CUDA=ON builds them all the same)")
  return()
elseif(wish STREQUAL "OFF")
  message(STATUS "CUDA kernels: not built (TINYSERVE_CUDA=OFF)")
  return()
endif()

include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  if(wish STREQUAL "ON")
    message(FATAL_ERROR "TINYSERVE_CUDA=ON needs nvcc (CUDA 12.8 or newer) in PATH or in CUDACXX; none was found. "
      "TINYSERVE_CUDA=OFF builds for the CPU alone.")
  endif()
  message(STATUS "CUDA kernels: not built (a GPU is visible, but nvcc was not found)")
  return()
endif()

# Must be set before the language is enabled, else CMake fixes its own default.
if(NOT CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES "80-real;90-real;90-virtual")
endif()
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
find_package(CUDAToolkit REQUIRED)
set(TINYSERVE_CUDA_ENABLED ON)
message(STATUS "CUDA kernels: ${CMAKE_CUDA_COMPILER_ID} ${CMAKE_CUDA_COMPILER_VERSION} for ${CMAKE_CUDA_ARCHITECTURES}")

# USE_CUDA makes torch's stable headers declare the call for the current stream. It lives in libtorch_cuda, which a CPU
# build of torch lacks: then an empty library of that name stands in at link time (as CUDA's own stub of libcuda does).
add_library(tinyserve_torch_cuda INTERFACE)
target_compile_definitions(tinyserve_torch_cuda INTERFACE USE_CUDA)
target_compile_options(tinyserve_torch_cuda INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>)
find_library(TINYSERVE_LIBTORCH_CUDA torch_cuda PATHS ${torch_dir}/lib NO_DEFAULT_PATH NO_CACHE)
if(TINYSERVE_LIBTORCH_CUDA)
  target_link_libraries(tinyserve_torch_cuda INTERFACE ${TINYSERVE_LIBTORCH_CUDA})
else()
  add_library(tinyserve_torch_cuda_stub SHARED cmake/torch_cuda_stub.cpp)
  set_target_properties(tinyserve_torch_cuda_stub PROPERTIES OUTPUT_NAME torch_cuda CXX_VISIBILITY_PRESET default)
  target_link_libraries(tinyserve_torch_cuda INTERFACE tinyserve_torch_cuda_stub)
endif()

# Compiler checks and the flags that every target shares: C++20, hidden symbols, RPATH beside the file, warnings,
# sanitizers. Targets take them by linking `tinyserve_flags`; `tinyserve_headers` only adds the include folder.

if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 11)
  message(FATAL_ERROR "tinyserve_ops needs a C++20 compiler: g++ 11 or newer; found g++ ${CMAKE_CXX_COMPILER_VERSION} "
    "(${CMAKE_CXX_COMPILER}). Choose another with CXX=g++-12.")
elseif(CMAKE_CXX_COMPILER_ID MATCHES "Clang" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 15)
  message(FATAL_ERROR "tinyserve_ops needs a C++20 compiler: clang 15 or newer; found ${CMAKE_CXX_COMPILER_VERSION} "
    "(${CMAKE_CXX_COMPILER}). Choose another with CXX=clang++-15.")
endif()
if(NOT "cxx_std_20" IN_LIST CMAKE_CXX_COMPILE_FEATURES)
  message(FATAL_ERROR "tinyserve_ops needs a C++20 compiler; ${CMAKE_CXX_COMPILER} has no C++20 mode.")
endif()

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_INSTALL_RPATH "$ORIGIN")
set(CMAKE_INSTALL_MESSAGE LAZY)

add_library(tinyserve_headers INTERFACE)
target_include_directories(tinyserve_headers INTERFACE ${PROJECT_SOURCE_DIR}/csrc)

add_library(tinyserve_flags INTERFACE)
target_link_libraries(tinyserve_flags INTERFACE tinyserve_headers)
target_compile_options(tinyserve_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow>)
target_link_options(tinyserve_flags INTERFACE -Wl,--as-needed)

set(kernel_optimisation -O3)
if(TINYSERVE_SANITIZE)
  target_compile_options(tinyserve_flags INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${TINYSERVE_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -g>)
  target_link_options(tinyserve_flags INTERFACE -fsanitize=${TINYSERVE_SANITIZE})
  # Instrumented kernels are slow to compile at -O3 and no more telling.
  set(kernel_optimisation -O1)
endif()

# Undefined symbols are errors at link time: that is how a stray dependency shows. Not for the Python module, whose
# Python symbols come from the interpreter, nor under sanitizers, which leave theirs open.
function(tinyserve_close target)
  if(NOT TINYSERVE_SANITIZE)
    target_link_options(${target} PRIVATE -Wl,-z,defs)
  endif()
endfunction()

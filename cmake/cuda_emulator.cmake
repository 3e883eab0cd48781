# The CUDA emulator of the C++ tests: kernels compiled by the C++ compiler and run on the CPU. It needs the toolkit's
# headers (number types, vector types) and neither nvcc nor a GPU. Sets TINYSERVE_CUDA_EMULATOR_ENABLED.

find_package(CUDAToolkit 12.8 QUIET)
if(NOT CUDAToolkit_FOUND)
  set(TINYSERVE_CUDA_EMULATOR_ENABLED OFF)
  message(STATUS "CUDA emulator tests: left out (no CUDA toolkit of version 12.8 or newer was found)")
  return()
endif()
if(TINYSERVE_SANITIZE MATCHES thread)
  set(TINYSERVE_CUDA_EMULATOR_ENABLED OFF)
  message(STATUS "CUDA emulator tests: left out (they run in one thread, where ThreadSanitizer sees nothing)")
  return()
endif()
set(TINYSERVE_CUDA_EMULATOR_ENABLED ON)

# The emulator itself, of the given sources. Who links it compiles kernels for it.
function(tinyserve_cuda_emulator)
  add_library(tinyserve_cuda_emulator STATIC ${ARGN})
  target_link_libraries(tinyserve_cuda_emulator PRIVATE tinyserve_flags)
  target_include_directories(tinyserve_cuda_emulator PUBLIC tests/cpp)
  target_include_directories(tinyserve_cuda_emulator SYSTEM PUBLIC ${CUDAToolkit_INCLUDE_DIRS})
  target_compile_definitions(tinyserve_cuda_emulator PUBLIC TINYSERVE_CUDA_EMULATOR)
  # A kernel runs a thousand threads one after the other: optimised in debug builds, too. The pragmas are nvcc's.
  target_compile_options(tinyserve_cuda_emulator PUBLIC ${kernel_optimisation} -Wno-unknown-pragmas)
  # A fortified longjmp refuses to change stacks.
  target_compile_options(tinyserve_cuda_emulator PRIVATE -U_FORTIFY_SOURCE)
endfunction()

# The given .cu files for the emulator: g++ takes them as the one include of a generated .cpp.
function(tinyserve_emulated_kernels)
  foreach(source ${ARGN})
    string(REPLACE "csrc/" "" include ${source})
    string(MAKE_C_IDENTIFIER ${include} stem)
    set(wrapper ${PROJECT_BINARY_DIR}/cuda_emulator/${stem}.cpp)
    file(CONFIGURE OUTPUT ${wrapper} CONTENT "#include \"${include}\"\n" @ONLY)
    list(APPEND wrappers ${wrapper})
  endforeach()
  add_library(tinyserve_emulated_kernels STATIC ${wrappers})
  target_link_libraries(tinyserve_emulated_kernels PRIVATE tinyserve_flags PUBLIC tinyserve_cuda_emulator)
endfunction()

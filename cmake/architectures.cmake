# Which GPUs to build for: a choice in CMake's words, made into architectures that nvcc has.

# The toolkit that brought an architecture, where it is newer than the oldest that builds the kernels.
set(JAXLLM_CUDA_OF_88 13.0)
set(JAXLLM_CUDA_OF_100 12.8)
set(JAXLLM_CUDA_OF_103 12.9)
set(JAXLLM_CUDA_OF_110 13.0)
set(JAXLLM_CUDA_OF_120 12.8)
set(JAXLLM_CUDA_OF_121 12.9)
set(JAXLLM_MIN_ARCHITECTURE 80)

# The GPUs of this machine, as "80-real;90a-real"; empty without one.
function(jaxllm_find_gpus out)
  execute_process(
    COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
    OUTPUT_VARIABLE capabilities RESULT_VARIABLE no_gpu ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
  set(gpus "")
  if(NOT no_gpu AND capabilities MATCHES "^[0-9]+\\.[0-9]")
    string(REPLACE "." "" gpus "${capabilities}")
    string(REGEX REPLACE "[ \r\n]+" ";" gpus "${gpus}")
    list(REMOVE_DUPLICATES gpus)
    list(TRANSFORM gpus REPLACE "^90$" "90a")
    list(TRANSFORM gpus APPEND "-real")
  endif()
  set(${out} "${gpus}" PARENT_SCOPE)
endfunction()

# The architectures that an nvcc compiles for, as "80;86;90", in ascending order. It lists none of
# the variants with a letter.
function(jaxllm_list_architectures nvcc out)
  execute_process(COMMAND "${nvcc}" --list-gpu-code
                  OUTPUT_VARIABLE listed ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
  string(REGEX MATCHALL "sm_[0-9]+" known "${listed}")
  list(TRANSFORM known REPLACE "sm_" "")
  list(SORT known COMPARE NATURAL)
  set(${out} "${known}" PARENT_SCOPE)
endfunction()

# Makes a choice, such as "80-real;90a-real;90-virtual", "native", "all" or "all-major", into what to
# pass to nvcc, which has the architectures `known`.
#
# `source` says where the choice comes from. An architecture that nvcc lacks is an error where it is
# asked for and the kernels are (`mode` is ON). Else the newest PTX that the GPU can run stands in,
# with a warning: for a GPU that this machine happens to have (`source` is GPU) always.
function(jaxllm_resolve_architectures choice source mode version known out)
  list(FILTER known EXCLUDE REGEX "^[1-7][0-9]$")  # below JAXLLM_MIN_ARCHITECTURE
  string(REPLACE ";" ", " known_text "${known}")
  set(resolved "")
  foreach(entry IN LISTS choice)
    if(entry STREQUAL "native")
      jaxllm_find_gpus(gpus)
      if(NOT gpus)
        message(FATAL_ERROR
          "${source} is native, but nvidia-smi finds no GPU here; name an architecture, such as 90a.")
      endif()
      jaxllm_resolve_architectures("${gpus}" GPU "${mode}" "${version}" "${known}" gpus)
      list(APPEND resolved ${gpus})
      continue()
    elseif(entry MATCHES "^all(-major)?$")
      # Machine code for each, with Hopper's own instructions, and PTX for GPUs to come.
      set(all ${known})
      if(entry STREQUAL "all-major")
        list(FILTER all INCLUDE REGEX "0$")
      endif()
      list(GET all -1 newest)
      list(TRANSFORM all REPLACE "^90$" "90a")
      list(TRANSFORM all APPEND "-real")
      list(APPEND resolved ${all} "${newest}-virtual")
      continue()
    elseif(NOT entry MATCHES "^([0-9]+)([af]?)(-real|-virtual)?$")
      message(FATAL_ERROR
        "${source} has '${entry}'; write numbers between semicolons, such as 80-real;90a-real;90-virtual "
        "(-real is machine code, -virtual PTX, neither both), or native, all, or all-major.")
    endif()
    set(number "${CMAKE_MATCH_1}")
    set(letter "${CMAKE_MATCH_2}")
    if(number LESS JAXLLM_MIN_ARCHITECTURE)
      message(FATAL_ERROR
        "${source} has '${entry}', but the kernels need sm_${JAXLLM_MIN_ARCHITECTURE} or newer.")
    elseif(letter STREQUAL "a" AND number LESS 90)
      message(FATAL_ERROR "${source} has '${entry}', but sm_${number} has no variant a.")
    elseif(letter STREQUAL "f")
      message(FATAL_ERROR
        "${source} has '${entry}', but no kernel has instructions of a family; write ${number}.")
    elseif(number IN_LIST known)
      list(APPEND resolved "${entry}")
      continue()
    endif()
    # nvcc lacks it.
    set(wanted "a newer CUDA toolkit")
    if(DEFINED JAXLLM_CUDA_OF_${number})
      set(wanted "CUDA ${JAXLLM_CUDA_OF_${number}} or newer")
    endif()
    set(older "")
    foreach(each IN LISTS known)
      if(each LESS number)
        set(older "${each}")
      endif()
    endforeach()
    if(source STREQUAL "GPU")
      set(lack "nvcc ${version} does not know sm_${number}, the GPU of this machine")
    else()
      set(lack "${source} has '${entry}', which nvcc ${version} does not know")
    endif()
    if(NOT older OR (mode STREQUAL "ON" AND NOT source STREQUAL "GPU"))
      message(FATAL_ERROR
        "${lack}; install ${wanted}, or name one that it knows (${known_text}). Newer GPUs run the "
        "PTX of an older architecture, such as 90-virtual.")
    endif()
    message(WARNING
      "jaxllm: ${lack}. The kernels are built as PTX for compute_${older}, which the driver "
      "compiles when a program first runs; install ${wanted} for machine code.")
    list(APPEND resolved "${older}-virtual")
  endforeach()
  list(REMOVE_DUPLICATES resolved)
  set(${out} "${resolved}" PARENT_SCOPE)
endfunction()

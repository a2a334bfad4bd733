# Writes `header`: the list of FFI handlers that the source files after it define.
#
# The stem of a target is the handler's name in snake case: LayerNormForward is layer_norm_forward.
# The build runs CMake again when one of the source files changes. A header whose list stays the
# same is not written, so nothing recompiles. docs/kernel_table.py finds the handlers by the same rule.
function(jaxllm_write_handlers header)
  set(handlers "")
  foreach(source IN LISTS ARGN)
    file(READ "${source}" text)
    string(REGEX MATCHALL "\nJAXLLM_HANDLER\\([ \n]*[A-Za-z0-9_]+" definitions
           "${text}")
    foreach(definition IN LISTS definitions)
      string(REGEX MATCH "[A-Za-z0-9_]+$" handler "${definition}")
      string(REGEX REPLACE "([A-Z])" "_\\1" stem "${handler}")
      string(REGEX REPLACE "^_" "" stem "${stem}")
      string(TOLOWER "${stem}" stem)
      string(APPEND handlers " \\\n  HANDLER(${stem}, ${handler})")
    endforeach()
  endforeach()
  configure_file("${CMAKE_CURRENT_FUNCTION_LIST_DIR}/handlers.h.in" "${header}" @ONLY)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${ARGN})
endfunction()

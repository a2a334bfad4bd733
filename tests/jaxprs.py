"""What tests read of traced programs."""

import jax


def equations(program):
    """The equations of a jaxpr, and of those in it, once for each use."""
    for equation in program.eqns:
        yield equation
        parameters = list(equation.params.values())
        for inner in jax.tree.leaves(parameters, is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns"):
                yield from equations(inner)

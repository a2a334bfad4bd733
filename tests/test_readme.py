"""The README's example runs as it stands."""

import re
from pathlib import Path

import numpy as np

README = Path(__file__).parent.parent / "README.md"


def test_the_example_runs(capsys):
    (example,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    names = {}
    exec(compile(example, str(README), "exec"), names)
    for name, like in (("dx", "x"), ("dscale", "scale"), ("dbias", "bias")):
        assert names[name].shape == names[like].shape
        assert np.isfinite(names[name].astype("float32")).all()
    for name in ("y_pallas", "y_xla"):
        difference = np.abs(names[name].astype("float32") - names["y"].astype("float32"))
        assert difference.max() < 0.05, name
    assert "layer_norm_backward" in capsys.readouterr().out

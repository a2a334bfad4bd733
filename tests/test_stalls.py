"""The table of where a kernel's warps wait."""

import pytest

from benchmarks import stalls

HEADER = (
    "Address,Source,# Samples,Instructions Executed,"
    "stall_selected,stall_wait,stall_wait (Not Issued)"
)
LINES = [
    "0x10,      FFMA.FTZ R1 R2 R3,6,8,4,2,1",
    "0x20,      FFMA R2 R2 R3,3,8,3,0,0",
    "0x30, @!P0 BRA 0x10,40,8,0,40,39",
    "0x40,      MUFU.EX2 R4 R4,51,4,1,50,50",
]


def write(path, *kernels, header=HEADER, lines=LINES):
    parts = [["Kernel Name," + name, header, *lines] for name in kernels]
    path.write_text("\n".join(line for part in parts for line in part) + "\n")
    return path


def test_regions_end_at_waits_and_branches(tmp_path):
    (instructions,) = stalls.read(write(tmp_path / "a.csv", "kernel")).values()
    found = stalls.regions(instructions)
    assert [(x.first, [y.name for y in x.instructions], x.samples) for x in found] == [
        (0, ["FFMA", "FFMA"], 9),
        (2, ["BRA"], 40),
        (3, ["MUFU"], 51),
    ]


def test_table_has_shares_and_states(tmp_path, capsys):
    stalls.main([str(write(tmp_path / "a.csv", "kernel")), "--least", "0.1"])
    name, _, branch, exponential = capsys.readouterr().out.strip().splitlines()
    assert name == "kernel: 100 samples"
    assert " ".join(branch.split()) == "2 to 2 40.0% 8 BRA 1; wait 100%"
    assert " ".join(exponential.split()) == "3 to 3 51.0% 4 MUFU 1; wait 98%, selected 2%"


def test_launches_of_a_kernel_are_numbered_and_one_that_is_written_twice_counts_once(tmp_path):
    path = write(tmp_path / "a.csv", "kernel", "kernel", "other", "kernel")
    assert list(stalls.read(path)) == ["kernel", "other", "kernel #2"]


def test_only_the_kernels_that_are_asked_for_are_printed(tmp_path, capsys):
    stalls.main([str(write(tmp_path / "a.csv", "forward", "backward")), "--kernel", "back"])
    assert capsys.readouterr().out.startswith("backward: 100 samples\n")


def test_files_without_kernels_or_samples_are_errors(tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n")
    with pytest.raises(ValueError, match=r"a\.csv has no kernel: it must be the CSV"):
        stalls.read(tmp_path / "a.csv")
    header = HEADER.replace("# Samples", "Samples")
    with pytest.raises(ValueError, match=r"has no samples: pass --section SourceCounters to ncu"):
        stalls.read(write(tmp_path / "b.csv", "kernel", header=header))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.csv"], "No such file or directory"),
        (["empty.csv"], "empty.csv has no kernel"),
        (["a.csv", "--kernel", "nothing"], "--kernel 'nothing' is in no name of forward"),
    ],
)
def test_command_line_rejects_invalid_arguments(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.csv", "forward")
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(SystemExit, match="2"):
        stalls.main(arguments)
    assert message in capsys.readouterr().err

import pytest

from jaxllm.data import files


def names(folder):
    return [path.name for path in folder.iterdir()]


def test_replacing_writes_a_file_atomically(tmp_path):
    path = tmp_path / "folder" / "file"
    for text in ("old", "new"):
        with files.replacing(path) as partial:
            partial.write_text(text)
    with pytest.raises(OSError, match="disk full"), files.replacing(path) as partial:
        partial.write_text("half")
        raise OSError("disk full")
    assert path.read_text() == "new"
    assert names(path.parent) == ["file"]


@pytest.mark.parametrize("linked", [False, True])
def test_new_folder_is_created_atomically(tmp_path, linked):
    folder = tmp_path / "there" / "folder"
    if linked:
        folder.mkdir(parents=True)
        (tmp_path / "link").symlink_to(folder)
    named = tmp_path / "link" if linked else folder
    for overwrite, text in ((False, "old"), (True, "new")):
        with files.new_folder(named, overwrite=overwrite) as partial:
            (partial / text).write_text(text)
    with pytest.raises(OSError, match="disk full"), files.new_folder(named, overwrite=True) as new:
        (new / "half").write_text("half")
        raise OSError("disk full")
    with pytest.raises(FileExistsError, match="exists already"), files.new_folder(named):
        pass
    assert names(named) == ["new"]
    assert names(folder.parent) == ["folder"]
    assert folder.stat().st_mode == folder.parent.stat().st_mode


def test_new_folder_does_not_replace_a_file(tmp_path):
    (tmp_path / "notes").write_text("mine")
    with (
        pytest.raises(FileExistsError, match="notes: exists already, and is not a folder"),
        files.new_folder(tmp_path / "notes", overwrite=True),
    ):
        pass
    assert names(tmp_path) == ["notes"]
    assert (tmp_path / "notes").read_text() == "mine"


def test_digest_depends_on_sizes_and_on_both_ends_of_files(tmp_path):
    def digest(*contents):
        paths = [tmp_path / str(i) for i in range(len(contents))]
        for path, content in zip(paths, contents, strict=True):
            path.write_bytes(content)
        return files.digest_of(paths, block=4)

    first = digest(b"abcdefghi", b"")
    assert digest(b"abcd0fghi", b"") == first
    for contents in ((b"0bcdefghi", b""), (b"abcdefgh0", b""), (b"abcdeefghi", b"")):
        assert digest(*contents) != first
    assert digest(b"", b"abcdefghi") != first


def test_walk_lists_skipped_files_with_reasons(tmp_path):
    for name in ("b/x.txt", "a.txt", "b/test_x.txt", "tests/x.txt", ".git/x.txt", "c/.x.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "c" / "up").symlink_to("..")
    (tmp_path / "c" / "b").symlink_to("../b")
    other = "a folder that is read under another path"
    found = {str(path.relative_to(tmp_path)): why for path, why in files.walk(tmp_path, ["test*"])}
    assert found == {
        ".git": "hidden",
        "a.txt": "",
        "b/test_x.txt": "skipped",
        "b/x.txt": "",
        "c/.x.txt": "hidden",
        "c/b": other,
        "c/up": other,
        "tests": "skipped",
    }
    assert list(found) == sorted(found)

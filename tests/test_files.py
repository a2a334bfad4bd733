import pytest

from jaxllm import files


def names(folder):
    return [path.name for path in folder.iterdir()]


def test_a_file_is_replaced_when_the_new_one_is_whole(tmp_path):
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
def test_a_folder_is_replaced_when_the_new_one_is_whole(tmp_path, linked):
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

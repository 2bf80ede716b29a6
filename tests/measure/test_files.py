"""A results file is replaced in one step, so a write that fails leaves the old file."""

import resource

import pytest

from common.measure import files


def test_a_file_is_replaced_through_a_link_and_kept_if_the_write_fails(tmp_path):
    path, link = tmp_path / "run.json", tmp_path / "link.json"
    link.symlink_to(path)
    files.replace(path, "first")
    files.replace(link, "good")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # like a full disk
    try:
        with pytest.raises(OSError):
            files.replace(path, 2000 * "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert link.is_symlink() and path.read_text() == "good" and sorted(tmp_path.iterdir()) == [link, path]

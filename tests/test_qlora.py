"""Chapter 22: TODO."""


def test_todo():
    raise AssertionError("TODO")

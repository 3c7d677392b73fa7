"""What runs of the examples leave behind: their results, and the arrays of their checkpoints."""

import json

import orbax.checkpoint as ocp


def snapshot(directory):
    """Returns the contents of all files below a directory by path, None for a folder."""
    return {path.relative_to(directory): path.read_bytes() if path.is_file() else None for path in directory.rglob("*")}


def results(out):
    """Returns the results that a run wrote."""
    return json.loads((out / "results.json").read_text())


def saved_arrays(out):
    """Returns the arrays of the only checkpoint of a run."""
    (save,) = (out / "checkpoints").glob("save_*")
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(save.absolute() / "arrays")

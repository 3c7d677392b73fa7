"""Makes signatures and docstrings readable in the reference, as an extension of Griffe, which mkdocstrings reads code with."""

import re

import griffe

_ARXIV = re.compile(r"\barXiv:(\d{4}\.\d{5})")
_DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class Readable(griffe.Extension):
    """Replaces type aliases by their definitions, links papers, and marks examples as code."""

    def on_instance(self, *, obj: griffe.Object, **_) -> None:
        if obj.docstring is not None:
            text = _ARXIV.sub(r"[\g<0>](https://arxiv.org/abs/\1)", obj.docstring.value)
            obj.docstring.value = _DOCTEST.sub(r"```pycon\n\g<0>\n```", text)

    def on_function(self, *, func: griffe.Function, loader: griffe.GriffeLoader, **_) -> None:
        for parameter in func.parameters:
            parameter.annotation = _written_out(parameter.annotation, loader.modules_collection)


def _written_out(annotation, modules):
    """Returns `int | Sequence[int] | None` for `Axis`: an annotation without the aliases that the library defines."""
    if isinstance(annotation, griffe.ExprBinOp):
        annotation.left = _written_out(annotation.left, modules)
        annotation.right = _written_out(annotation.right, modules)
    names = griffe.ExprName | griffe.ExprAttribute
    if isinstance(annotation, names) and annotation.canonical_path.startswith("jaxsoftmax."):
        definition = modules[annotation.canonical_path]
        if definition.is_attribute and definition.value is not None:
            return definition.value
    return annotation

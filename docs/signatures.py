"""Makes signatures and docstrings readable in the reference, as an extension of Griffe, which mkdocstrings reads code with."""

import re

import griffe

_DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class Readable(griffe.Extension):
    """Replaces type aliases by their definitions, and marks the examples of docstrings as code."""

    def on_instance(self, *, obj: griffe.Object, **_) -> None:
        if obj.docstring is not None:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = _DOCTEST.sub(r"```pycon\n\g<0>\n```", text)

    def on_function(self, *, func: griffe.Function, **_) -> None:
        for parameter in func.parameters:
            parameter.annotation = _written_out(parameter.annotation, func.module)


def _written_out(annotation, module):
    """Returns `int | Sequence[int] | None` for `Axis`: an annotation without the aliases that its module defines."""
    if isinstance(annotation, griffe.ExprBinOp):
        annotation.left = _written_out(annotation.left, module)
        annotation.right = _written_out(annotation.right, module)
    if isinstance(annotation, griffe.ExprName):
        definition = module.members.get(annotation.name)
        if isinstance(definition, griffe.Attribute) and definition.value is not None:
            return definition.value
    return annotation

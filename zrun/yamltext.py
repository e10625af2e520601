"""YAML text -> values that know where they were written. Pure.

Loading the library takes as long as everything else that a launch loads, so only who has such a file imports this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from zrun.errors import UsageError

_MAX_DEPTH = 20


@dataclass(frozen=True)
class Item:
    """One value.

    `value` is what YAML reads (str, int, float, bool, None), a list of Items, or a dict from str to Item. `text` is
    how a scalar is written, empty for others.
    """

    value: Any
    text: str
    where: str  # file:line:column


def parse_yaml(text: str, name: str) -> Item:
    """The document in `text`; of an empty one the value is None.

    Args:
        name: of the file, for errors.

    Raises:
        UsageError: naming the place, if it is not YAML, a key is there twice or no plain word, or there is more than
            one document.
    """
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        return _Reader(loader, name).read(node, 0) if node is not None else Item(None, "", f"{name}:1:1")
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        raise UsageError(f"{where}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{name}: not valid YAML: {str(error).splitlines()[0]}") from None


class _Reader:
    """Turns the nodes of a document into Items."""

    def __init__(self, loader: yaml.SafeLoader, name: str) -> None:
        self._loader = loader
        self._name = name

    def read(self, node: yaml.Node, depth: int) -> Item:
        where = f"{self._name}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"
        if depth > _MAX_DEPTH:
            raise UsageError(f"{where}: more than {_MAX_DEPTH} levels deep, or a value that holds itself")
        if isinstance(node, yaml.SequenceNode):
            return Item([self.read(item, depth + 1) for item in node.value], "", where)
        if isinstance(node, yaml.MappingNode):
            values: dict[str, Item] = {}
            for key_node, value_node in node.value:
                key = self.read(key_node, depth + 1)
                if not key.text:
                    raise UsageError(f"{key.where}: a key is a plain word")
                if key.text in values:
                    raise UsageError(f"{key.where}: {key.text} is there twice", "leave one of them out")
                values[key.text] = self.read(value_node, depth + 1)
            return Item(values, "", where)
        return Item(self._loader.construct_object(node), node.value, where)

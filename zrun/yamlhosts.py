"""Hostfiles in YAML, with the same content as those of one line a host. Pure.

hosts:
  worker-1: 8                            # slots
  node-[1-4]: {slots: 4, user: me}       # any key of a hostfile's line
# or a list, each with its name
  - {name: worker-1, slots: 8}
"""

from __future__ import annotations

from collections.abc import Iterator

from zrun.errors import UsageError
from zrun.hostfile import Host, Hostfile, Notes, Value, finish, make_hosts, read_names
from zrun.yamltext import Item, parse_yaml

_HINT = "write hosts: and below it a line like worker-1: 8 for each host"


def parse_yaml_hostfile(text: str, name: str) -> Hostfile:
    """The hosts of a YAML hostfile's text.

    Args:
        name: of the file, for errors.

    Raises:
        UsageError: naming file, line and column, the text there, and what to write.
    """
    document = parse_yaml(text, name)
    if document.value is None:
        return finish([], Notes(), name)
    if not isinstance(document.value, dict) or "hosts" not in document.value:
        raise UsageError(f"{document.where}: there is no key hosts", _HINT)
    odd = next((key for key in document.value if key != "hosts"), None)
    if odd is not None:
        raise UsageError(f"{document.value[odd].where}: {odd}: unknown key", _HINT)
    notes = Notes()
    hosts = [host for entry in _entries(document.value["hosts"]) for host in _read_entry(*entry, notes)]
    return finish(hosts, notes, name)


def _entries(hosts: Item) -> Iterator[tuple[str, Item]]:
    """Name and values of each entry."""
    if isinstance(hosts.value, dict):
        yield from hosts.value.items()
    elif isinstance(hosts.value, list):
        for item in hosts.value:
            if not isinstance(item.value, dict) or "name" not in item.value:
                raise UsageError(f"{item.where}: an entry of a list has a name", "write - {name: worker-1, slots: 8}")
            rest = {key: value for key, value in item.value.items() if key != "name"}
            yield item.value["name"].text, Item(rest, "", item.value["name"].where)
    elif hosts.value is not None:
        raise UsageError(f"{hosts.where}: {hosts.text!r} is not a list of hosts", _HINT)


def _read_entry(name: str, item: Item, notes: Notes) -> list[Host]:
    values = item.value if isinstance(item.value, dict) else {"slots": item}
    odd = next((key for key, value in values.items() if isinstance(value.value, (dict, list))), None)
    if odd is not None:
        raise UsageError(f"{values[odd].where}: {odd} of {name} is one plain value", _HINT)
    texts = {key: Value(value.text, value.where) for key, value in values.items()}
    return make_hosts(read_names(name, item.where), texts, notes)

"""Test that changes of layers, transforms and tables of arrays are counted."""

import copy
import pickle

import pytest

import mpidl as dl
from mpidl import attribute_changes
from mpidl.attribute_changes import CountingDict
from mpidl.training.optimizers import Momentum

CHANGES = {
    "item": lambda table: table.__setitem__("a", 2),
    "deletion": lambda table: table.__delitem__("a"),
    "union": lambda table: table.__ior__({"b": 3}),
    "clear": lambda table: table.clear(),
    "pop": lambda table: table.pop("a"),
    "popitem": lambda table: table.popitem(),
    "setdefault": lambda table: table.setdefault("b", 3),
    "update": lambda table: table.update(b=3),
}


def counted(change):
    """Return by how much a call of change() increments the count."""
    before = attribute_changes.count
    change()
    return attribute_changes.count - before


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_a_table_is_counted(change):
    table, expected = CountingDict(a=1), {"a": 1}
    assert counted(lambda: CHANGES[change](table)) == 1
    CHANGES[change](expected)
    assert table == expected


def test_all_methods_that_change_a_dict_are_counted():
    readers = {"copy", "fromkeys", "get", "items", "keys", "values"}
    methods = {name for name in vars(dict) if not name.startswith("_")} - readers
    methods |= {"__setitem__", "__delitem__", "__ior__"}
    assert {name for name in methods if name in vars(CountingDict)} == methods


def test_reading_and_copying_a_table_is_not_counted():
    table = CountingDict(a=1)
    assert not counted(lambda: [table["a"], list(table.items()), {**table}, table | {"b": 2}])
    for other in copy.deepcopy(table), pickle.loads(pickle.dumps(table)):
        assert other == table


@pytest.mark.parametrize("part", [dl.Conv2D(3, 4), Momentum(0.9)])
def test_changes_of_attributes_are_counted(part):
    assert counted(lambda: setattr(part, "momentum", 0.5)) == 1
    assert counted(lambda: delattr(part, "momentum")) == 1
    assert not counted(lambda: vars(part))


def test_a_network_counts_changes_of_its_tables():
    net = dl.Network([dl.Dense(2)], (1, 2, 2))
    net.parameters = {name: array * 2 for name, array in net.parameters.items()}
    assert counted(lambda: net.parameters.update(net.parameters)) == 1

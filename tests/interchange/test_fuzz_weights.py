"""Any bytes of a weight file give weights or a UserError of one line, in little memory."""

import json

from fuzzing import FUZZ, attempt, bounded
from hypothesis import given
from hypothesis import strategies as st

import mpidl as dl

__all__ = ["bounded"]


def network():
    return dl.Network([dl.Conv2D(3, 4), dl.BatchNorm(), dl.Dense(3, name="fc")], (2, 6, 5))


HEADERS = st.dictionaries(
    st.sampled_from(["fc.weight", "fc.bias", "__metadata__", "x"]),
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "F64", "BF16", "I64", "F99", "C64"]),
            "shape": st.lists(st.sampled_from([0, 1, 3, 48, 2**31, 2**62]), max_size=5),
            "data_offsets": st.lists(st.sampled_from([0, 4, 576, 2**40, 2**63]), max_size=3),
        }
    ),
    max_size=3,
)


@FUZZ
@given(header=HEADERS, length=st.sampled_from([None, 0, 3, 2**40, 2**63]), data=st.binary())
def test_damaged_files(tmp_path_factory, header, length, data):
    path = tmp_path_factory.mktemp("fuzz") / "a.safetensors"
    text = json.dumps(header).encode()
    size = len(text) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + text + data)
    attempt(dl.load_weights, network(), path)


@FUZZ
@given(data=st.data())
def test_damaged_valid_files(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("fuzz") / "a.safetensors"
    dl.save_weights(network(), path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    attempt(dl.load_weights, network(), path)

"""The shared checks of ops show the values of a failed assertion, as those of a test file do."""

import pytest

pytest.register_assert_rewrite("op_references")

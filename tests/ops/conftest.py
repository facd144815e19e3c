"""Let pytest rewrite the assertions in the shared checks of ops, like in test files."""

import pytest

pytest.register_assert_rewrite("op_references")

"""Make pytest rewrite the assertions in the shared checks of ops, as it does in test files."""

import pytest

pytest.register_assert_rewrite("op_references")

"""Let pytest rewrite the assertions in the shared checks of ops, as in a test file."""

import pytest

pytest.register_assert_rewrite("op_references")

"""Test the parser of C declarations and CUDA kernels."""

from mpidl.backends.declarations import Function, Value, exported, kernels

COUNT = Value("count", "int64_t")


def test_exported_functions_are_read_in_order():
    header = """
    /* void mpidl_not(void); */
    const char *mpidl_text(void); // void mpidl_nor(void);
    int64_t mpidl_sum(const float *x, double *sums /* two */, int64_t count);
    void mpidl_hook(void (*function)(void));
    extern int64_t mpidl_number;
    """
    x, sums = Value("x", "float", True, True), Value("sums", "double", True)
    functions = exported(header)
    assert list(functions) == ["text", "sum", "hook"]
    assert functions["text"] == Function(Value("text", "char", True, True), ())
    assert functions["sum"] == Function(Value("sum", "int64_t"), (x, sums, COUNT))
    assert [value.type for value in functions["hook"].parameters] == [""]


def test_white_space_does_not_matter_but_names_and_types_do():
    text = "void mpidl_one(const float *x, int64_t count);"
    spaced = "void mpidl_one(const float  *x,\n    int64_t count);"
    assert exported(spaced) == exported(text)
    for other in (text.replace("x", "y"), text.replace("const ", ""), text.replace("int64", "int")):
        assert exported(other) != exported(text)


def test_kernels_are_read_with_and_without_bounds():
    source = """
    // extern "C" __global__ void nothing(int n) {}
    extern "C" __global__ void __launch_bounds__(THREADS, 2)
    first(const long long* __restrict__ table, unsigned char* y, long long n) {}
    extern "C" __global__ void second() {}
    __device__ void helper(int n) {}
    """
    table, y = Value("table", "long long", True, True), Value("y", "unsigned char", True)
    first = Function(Value("first", "void"), (table, y, Value("n", "long long")))
    assert kernels(source) == {"first": first, "second": Function(Value("second", "void"), ())}

// A part of a parameter that a block of threads processes.
//
// parameters: for each parameter, its number of floats and the addresses of its arrays, in rows of
// `columns` numbers. places: for each block of threads, its parameter and the index of its first
// float; a block processes at most `chunk` floats.
struct Part {
    const long long* row;
    int parameter, first, count;

    __device__ __forceinline__ Part(const long long* parameters, const int* places, int columns,
                                    int chunk)
        : parameter(places[2 * blockIdx.x]), first(places[2 * blockIdx.x + 1]) {
        row = parameters + columns * parameter;
        count = min((long long)chunk, row[0] - first);
    }
    // Returns this part of array number 1, 2, ... of the parameter.
    __device__ __forceinline__ float* array(int number) const {
        return (float*)row[number] + first;
    }
};

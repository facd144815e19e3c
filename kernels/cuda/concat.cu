// Concatenates values along the channels, and splits them again.
//
// `part` has `rows` rows of `words` numbers, which are channels of a pixel. `whole` has rows of
// `pitch` numbers. The part begins at number `first` of each row of `whole`.

template <bool SPLIT, class T>
__device__ __forceinline__ void move(T* part, T* whole, long long rows, int words, int pitch,
                                     int first) {
    EACH_INDEX(i, rows * words) {
        const long long row = i / words, at = row * pitch + first + (i - row * words);
        if (SPLIT)
            part[i] = whole[at];
        else
            whole[at] = part[i];
    }
}

template <bool SPLIT>
__device__ __forceinline__ void move_values(value* part, value* whole, long long rows, int words,
                                            int pitch, int first) {
    if (words % 4 == 0 && pitch % 4 == 0 && first % 4 == 0)
        move<SPLIT>(reinterpret_cast<Stored<4>*>(part), reinterpret_cast<Stored<4>*>(whole), rows,
                    words / 4, pitch / 4, first / 4);
    else
        move<SPLIT>(part, whole, rows, words, pitch, first);
}

extern "C" __global__ void __launch_bounds__(256)
concat(value* part, value* whole, long long rows, int words, int pitch, int first) {
    move_values<false>(part, whole, rows, words, pitch, first);
}

extern "C" __global__ void __launch_bounds__(256)
split(value* part, value* whole, long long rows, int words, int pitch, int first) {
    move_values<true>(part, whole, rows, words, pitch, first);
}

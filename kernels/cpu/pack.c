/* The order of the taps of a direct sum, and its packed weights; see struct packing of conv.h. */
#include "conv.h"

#ifndef ODD_FIRST
#define ODD_FIRST 1 /* a test compiles the wrong order */
#endif

void add_tap(struct taps *taps, int64_t channel, int64_t channels, int64_t of_channel,
             int64_t per_channel, int64_t index, int64_t offset) {
    const int64_t second = channel + 1 < channels;
    if (taps->form == PAIRS) {
        taps->index[2 * taps->count] = (int32_t)(channel * per_channel + index);
        taps->index[2 * taps->count + 1] =
            second ? (int32_t)((channel + 1) * per_channel + index) : -1;
        taps->offset[taps->count++] = (int32_t)(channel / 2 * of_channel + offset);
        return;
    }
    const int64_t last = taps->form == ROUNDED ? second : 0;
    for (int64_t n = 0; n <= last; n++) {
        const int64_t i = ODD_FIRST ? last - n : n;
        taps->index[taps->count] = (int32_t)((channel + i) * per_channel + index);
        taps->offset[taps->count++] = (int32_t)((channel + i) * of_channel + offset);
    }
}

/* Return words: numbers for FLOATS and ROUNDED, where `odd` is not used, and pairs for PAIRS. */
INLINE vec items_of(enum form form, vec even, vec odd) {
    if (form == PAIRS) return paired(even, odd);
    return form == ROUNDED ? rounded(even) : even;
}

/* Return the words of WIDTH taps of one output whose weights are adjacent, see adjacent_taps. */
INLINE vec adjacent_words(enum form form, const float *weight) {
#if PER_WORD == 2
    if (form == PAIRS) return words_of(load(weight), load(weight + WIDTH));
#endif
#define OTHER_OF_PAIR(j, s) ((j) ^ (s))
    vec v = load(weight);
    return form == ROUNDED ? rounded(SHUFFLE(v, v, EACH_LANE(OTHER_OF_PAIR, 1))) : v;
}

/* Return how many of the first taps, in whole vectors, have adjacent weights in the order in which
 * add_tap arranges channels of 1x1 filters, or floats of any filters. */
static int64_t adjacent_taps(enum form form, int64_t taps, const int32_t *index) {
    const int64_t each = form == PAIRS ? 2 : 1, swap = form == ROUNDED;
    int64_t count = 0;
    while (count < taps * each && index[count] - index[0] == (count ^ swap) - swap) count++;
    return count / each / WIDTH * WIDTH;
}

/* Store the quarters of 16 bytes of a vector, `stride` floats apart. */
INLINE void store_quarters(float *to, int64_t stride, vec v) {
#if WIDTH == 16
    _mm_storeu_ps(to, _mm512_castps512_ps128((__m512)v));
    _mm_storeu_ps(to + stride, _mm512_extractf32x4_ps((__m512)v, 1));
    _mm_storeu_ps(to + 2 * stride, _mm512_extractf32x4_ps((__m512)v, 2));
    _mm_storeu_ps(to + 3 * stride, _mm512_extractf32x4_ps((__m512)v, 3));
#elif WIDTH == 8
    _mm_storeu_ps(to, _mm256_castps256_ps128((__m256)v));
    _mm_storeu_ps(to + stride, _mm256_extractf128_ps((__m256)v, 1));
#else
    store(to, v);
#endif
}

/* Pack WIDTH outputs whose weights are adjacent. */
INLINE void pack_adjacent_outputs(enum form form, float *out, const float *weight, int64_t taps,
                                  const int32_t *index) {
    for (int64_t t = 0; t < taps; t++) {
        vec even = load(weight + index[form == PAIRS ? 2 * t : t]), odd = zero();
        if (form == PAIRS && index[2 * t + 1] >= 0) odd = load(weight + index[2 * t + 1]);
        store_quarters(out + t * OUTPUTS, OUTPUTS * taps, items_of(form, even, odd));
    }
}

/* Pack the first taps of four outputs, `taps` taps whose weights are adjacent. */
INLINE void pack_adjacent_taps(enum form form, float *out, const float *weight, int64_t stride,
                               int64_t taps) {
    const int64_t each = form == PAIRS ? 2 : 1;
    for (int64_t t = 0; t < taps; t += WIDTH) {
        vec v[OUTPUTS];
        UNROLL for (int k = 0; k < OUTPUTS; k++) v[k] =
            adjacent_words(form, weight + k * stride + t * each);
        /* quarter q of row i becomes the four outputs of tap 4 * q + i */
#define EXCHANGE(i, j, s)                                                                          \
    {                                                                                              \
        vec a = v[i], b = v[j];                                                                    \
        v[i] = LOWER(a, b, s), v[j] = HIGHER(a, b, s);                                             \
    }
        EXCHANGE(0, 1, 1) EXCHANGE(2, 3, 1) EXCHANGE(0, 2, 2) EXCHANGE(1, 3, 2)
#undef EXCHANGE
        UNROLL for (int i = 0; i < OUTPUTS; i++)
            store_quarters(out + (t + i) * OUTPUTS, OUTPUTS * OUTPUTS, v[i]);
    }
}

/* Pack weights that may be anywhere. */
INLINE void gather_weights(enum form form, float *out, const float *weight, int64_t stride,
                           int64_t taps, const int32_t *index, const int high) {
    enum { CHUNK = 16 }; /* taps, so that the numbers of a chunk are whole vectors */
    float even[CHUNK * OUTPUTS] = {0}, odd[CHUNK * OUTPUTS] = {0};
    for (int64_t first = 0; first < taps; first += CHUNK) {
        const int64_t count = least(taps - first, CHUNK), numbers = count * high;
        for (int64_t t = 0; t < count; t++) {
            const int32_t *at = index + (first + t) * (form == PAIRS ? 2 : 1);
            UNROLL for (int k = 0; k < high; k++) {
                even[t * high + k] = weight[k * stride + at[0]];
                if (form == PAIRS)
                    odd[t * high + k] = at[1] < 0 ? 0 : weight[k * stride + at[1]];
            }
        }
        for (int64_t i = 0; i < numbers; i += WIDTH)
            store(even + i, items_of(form, load(even + i), load(odd + i)));
        memcpy(out + first * high, even, (size_t)numbers * sizeof(float));
    }
}

struct pack_job {
    struct packing packing;
    int64_t tiles, adjacent; /* tiles of a group; see adjacent_taps */
};

INLINE void pack_outputs(const struct pack_job *job, const enum form form, float *out,
                         const float *weight, int64_t outputs) {
    const struct packing *p = &job->packing;
    const int64_t taps = p->taps, stride = p->output_stride;
    if (stride == 1 && outputs == LANES) {
        for (int64_t k = 0; k < LANES; k += WIDTH)
            pack_adjacent_outputs(form, out + k * taps, weight + k, taps, p->index);
        return;
    }
    for (int64_t k = 0; k < outputs;
         k += OUTPUTS, out += OUTPUTS * taps, weight += OUTPUTS * stride) {
        const int64_t high = least(outputs - k, OUTPUTS), first = high == OUTPUTS ? job->adjacent : 0;
        const int32_t *rest = p->index + first * (form == PAIRS ? 2 : 1);
        if (first)
            pack_adjacent_taps(form, out, weight + p->index[0] - (form == ROUNDED), stride, first);
        float *to = out + first * high;
        if (high == OUTPUTS)
            gather_weights(form, to, weight, stride, taps - first, rest, OUTPUTS);
        else
            gather_weights(form, to, weight, stride, taps, rest, (int)high);
    }
}

static void pack_tile(void *argument, int64_t tile, float *own) {
    const struct pack_job *job = argument;
    const struct packing *p = &job->packing;
    const int64_t group = tile / job->tiles, k = tile % job->tiles * LANES;
    const int64_t outputs = least(p->outputs - k, LANES);
    float *out = p->out + (group * p->outputs + k) * p->taps;
    const float *weight = p->weight + group * p->group_stride + k * p->output_stride;
    if (p->form == PAIRS) pack_outputs(job, PAIRS, out, weight, outputs);
    else if (p->form == ROUNDED) pack_outputs(job, ROUNDED, out, weight, outputs);
    else pack_outputs(job, FLOATS, out, weight, outputs);
}

void pack_weights(const struct packing *packing) {
    struct pack_job job = {*packing, parts_of(packing->outputs, LANES), 0};
    job.adjacent = adjacent_taps(packing->form, packing->taps, packing->index);
    each_tile(packing->groups * job.tiles, pack_tile, &job, 0);
}

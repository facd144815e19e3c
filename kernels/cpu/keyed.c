/* Compute random words for a key with Philox4x64-10 (Salmon et al., "Parallel random numbers: as
 * easy as 1, 2, 3", SC 2011). A counter is (block, sample, epoch, 0), where blocks of four words
 * are counted from 1, as in NumPy's generator. */
#include <string.h>

#include "mpidl.h"

__extension__ typedef unsigned __int128 wide; /* all builds are for 64-bit machines */

enum { ROUNDS = 10, WORDS = 4 };

static void philox(uint64_t *c, uint64_t low, uint64_t high) {
    for (int round = 0; round < ROUNDS; round++) {
        wide first = (wide)c[0] * 0xD2E7470EE14C6C93u, second = (wide)c[2] * 0xCA5A826395121157u;
        uint64_t next[WORDS] = {(uint64_t)(second >> 64) ^ c[1] ^ low, (uint64_t)second,
                                (uint64_t)(first >> 64) ^ c[3] ^ high, (uint64_t)first};
        memcpy(c, next, sizeof next);
        low += 0x9E3779B97F4A7C15u;
        high += 0xBB67AE8584CAA73Bu;
    }
}

void mpidl_keyed_words(const int64_t *key, int64_t epoch, const int64_t *samples, int64_t n,
                       int64_t count, int64_t *words) {
    for (int64_t i = 0; i < n; i++)
        for (int64_t first = 0; first < count; first += WORDS) {
            uint64_t c[WORDS] = {(uint64_t)(first / WORDS + 1), (uint64_t)samples[i],
                                 (uint64_t)epoch, 0};
            philox(c, (uint64_t)key[0], (uint64_t)key[1]);
            int64_t left = count - first < WORDS ? count - first : WORDS;
            memcpy(words + i * count + first, c, (size_t)left * sizeof *words);
        }
}

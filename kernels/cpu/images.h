/* Declarations for the conversion of pixels to blocks of normalized floats. */
#ifndef MPIDL_IMAGES_H
#define MPIDL_IMAGES_H

#include <stdint.h>

/* A window of P x Q pixels in images (C, H, W); Python passes it as int64_t[6]. If of_pixels,
 * centre and divisor have one number per pixel (C, P, Q), else one per channel (C). */
struct crop {
    int64_t C, H, W, P, Q, of_pixels;
};

/* How images of bytes are moved, with one number per image; NULL means 0. `fill` has the value of
 * pixels outside the image for each channel. See mpidl_images. */
struct moves {
    const int32_t *mirrored, *top, *left;
    const uint8_t *fill;
};

/* Convert images of floats that are not moved. Image i is the row rows[i] of `all`, or the row i if
 * rows is NULL. If centre is NULL, the floats are not normalized. Unused lanes of the last block
 * become 0. Return whether all floats are finite. (In minibatch.c.) */
int64_t blocks_of_floats(const float *all, const int64_t *rows, int64_t images,
                         const struct crop *shape, const float *centre, const float *divisor,
                         float *lanes);

/* Convert a block of `valid` images of bytes. Image i is the row rows[i] of `all`, which ends at
 * `end`, and is moved by the numbers of image first + i in `moves`. (In images.c.) */
void block_of_bytes(const uint8_t *all, const uint8_t *end, const int64_t *rows, int valid,
                    const struct crop *shape, const struct moves *moves, int64_t first,
                    const float *centre, const float *divisor, float *lanes);

#endif

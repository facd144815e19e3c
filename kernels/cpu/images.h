/* Declarations for the conversion of pixels to blocks of normalized floats. */
#ifndef MPIDL_IMAGES_H
#define MPIDL_IMAGES_H

#include <stdint.h>

/* A window of P x Q pixels in images (C, H, W); Python passes it as int64_t[6]. If of_pixels,
 * centre and divisor have one number per pixel (C, P, Q), else one per channel (C). */
struct crop {
    int64_t C, H, W, P, Q, of_pixels;
};

/* Convert images of floats that are not shifted, mirrored or cropped. Image i is the row rows[i] of
 * `all`, or the row i if rows is NULL. If centre is NULL, the floats are not normalized. Unused
 * lanes of the last block become 0. Return whether all floats are finite. (In minibatch.c.) */
int64_t blocks_of_floats(const float *all, const int64_t *rows, int64_t images,
                         const struct crop *shape, const float *centre, const float *divisor,
                         float *lanes);

#endif

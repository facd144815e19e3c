/* What the forward and backward passes of a convolution share; see conv_pass.h. */
#include "conv_pass.h"

void lay_out(struct padded *p, enum form form, int64_t rows, int64_t columns, int64_t phases) {
    p->form = form, p->rows = rows, p->phases = phases;
    p->columns = parts_of(columns, phases) * phases;
    p->row_stride = p->columns * LANES;
    p->channel_stride = p->rows * p->row_stride;
}

int64_t padded_floats(const struct padded *p, int64_t channels, int64_t group) {
    const int64_t items = channels / group * item_channels(p->form, group) * p->channel_stride;
    return parts_of(floats_of(p->form, items), LANES) * LANES; /* whole cache lines */
}

void lay_out_x(struct pass *pass, const struct winograd *w, enum form form) {
    const struct conv *c = &pass->c;
    int64_t rows = most(c->H + c->top + c->bottom, (c->P - 1) * c->stride_h + 1);
    int64_t columns = most(c->W + c->left + c->right, (c->Q - 1) * c->stride_w + 1);
    if (w->m_h) {
        rows = most(rows, c->stride_h * winograd_extent(c->P, w->m_h, w->r));
        columns = most(columns, c->stride_w * winograd_extent(c->Q, w->m_w, w->r));
    }
    lay_out(&pass->in, form, rows, columns, c->stride_w);
    pass->in_place = !NARROW && !pass->x.mean && !pass->more && c->stride_w == 1 && rows == c->H &&
                     columns == c->W;
}

int32_t offset_of(const struct pass *pass, int64_t channel, int64_t r, int64_t s) {
    const struct conv *c = &pass->c;
    const int64_t wide = pass->in.columns / c->stride_w, column = s * c->dilation_w;
    return (int32_t)(channel * pass->in.channel_stride +
                     r * c->dilation_h * pass->in.row_stride +
                     (column % c->stride_w * wide + column / c->stride_w) * LANES);
}

/* Copy channels of x, which begin at `x`, to the first channels of items of `in`. */
static void bring_channels(const struct team *team, const struct pass *pass,
                           const struct padded *in, const value *x, int64_t groups, int64_t group,
                           struct rows rows) {
    const struct conv *c = &pass->c;
    const struct picture picture = {group,      c->H * c->W * LANES, rows.count,
                                    c->W,       rows.top,            c->left};
    EACH_TILE(team, ci, groups * item_channels(in->form, group)) {
        fill_source(in, ci, &pass->x, x + rows.first * c->W * LANES, picture);
        if (ci % 8 == 0) tick();
    }
}

const float *bring_x(const struct team *team, const struct pass *pass, int64_t block,
                     struct rows rows, int keep_border) {
    const struct conv *c = &pass->c;
    const int64_t pixels = c->H * c->W * LANES, first = pass->more ? pass->joined : c->C;
    const value *x = pass->x.x + block * first * pixels;
    if (pass->in_place) return (const float *)x;
    struct padded in = pass->in;
    in.data = team->shared, in.keep_border = keep_border;
    bring_channels(team, pass, &in, x, c->groups, first / c->groups, rows);
    if (pass->more) {
        const int64_t rest = c->C - first, before = item_channels(in.form, first);
        in.data = team->shared + floats_of(in.form, before * in.channel_stride);
        bring_channels(team, pass, &in, pass->more + block * rest * pixels, 1, rest, rows);
    }
    return team->shared;
}

void convolve(const struct team *team, const struct pass *pass, const struct padded *from,
              const float *in, struct finish finish, value *out) {
    const struct conv *c = &pass->c;
    const struct winograd *w = &pass->winograd;
    const int64_t outputs = (pass->backward ? c->C : c->K) / c->groups;
    const int64_t inputs = (pass->backward ? c->K : c->C) / c->groups;
    const int64_t row = w->columns * LANES, channel = (pass->backward ? c->H : c->P) * row;
    for (int64_t g = 0; g < c->groups; g++) {
        const float *group =
            in + floats_of(from->form,
                           g * item_channels(from->form, inputs) * from->channel_stride);
        const float *bias = pass->bias ? pass->bias + g * outputs : NULL;
        value *to = out + g * outputs * channel;
        struct finish last = finish;
        if (finish.addend) last.addend += to - out;
        if (w->m_h) {
            const int64_t step = pass->backward ? c->stride_h : 1; /* between pixels of a phase */
            const struct outputs y = {to, channel, step * row, step * LANES, row, LANES};
            winograd_conv(team, w, pixels_of(from, group, pass->backward ? 1 : c->stride_h),
                          pass->packed + g * pass->packed_group, bias, y, last,
                          team->shared + pass->winograd_at);
        }
        for (int64_t i = 0; i < pass->phase_count; i++) {
            const struct phase *phase = &pass->phases[i];
            int64_t first = phase->row * row + phase->column * LANES;
            struct finish of_phase = {last.addend ? last.addend + first : NULL, last.relu};
            struct direct d = {.pairs = from->form == PAIRS,
                               .taps = phase->taps,
                               .offset = phase->offset,
                               .weight = phase->weight + g * outputs * phase->taps,
                               .bias = bias,
                               .outputs = outputs,
                               .out = to + first,
                               .finish = of_phase,
                               .out_channel = channel,
                               .out_row = pass->step_h * row,
                               .out_pixel = pass->step_w * LANES,
                               .rows = phase->rows,
                               .columns = phase->columns,
                               .in = group,
                               .in_row = pass->in_step * from->row_stride};
            direct_rows(team, &d);
        }
    }
}

void block_moments(const struct team *team, const struct conv *c, const value *y, double *rows,
                   const int32_t *counts, int64_t block) {
    const int64_t pixels = c->P * c->Q;
    double *row = rows + block * (1 + 2 * c->K);
    meet(team);
    if (team->member == 0) row[0] = (double)(pixels * counts[block]);
    EACH_TILE(team, k, c->K)
    channel_moments(y + k * pixels * LANES, pixels, counts[block], row + 1 + k, row + 1 + c->K + k);
}

void block_norm_sums(const struct team *team, const struct conv *c, const value *dx,
                     const struct source *x, double *rows, int64_t block) {
    double *row = rows + block * 2 * c->C;
    meet(team);
    EACH_TILE(team, ci, c->C) {
        int64_t channel = (block * c->C + ci) * c->H * c->W * LANES;
        channel_norm_sums(dx + channel, x->x + channel, c->H * c->W, x, ci, row + ci,
                          row + c->C + ci);
    }
}

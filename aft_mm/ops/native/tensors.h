// The tensors [B, T, D] that Python passes, with their strides, and the heads of channels.

#pragma once

#include "vectors.h"

// Channels are contiguous; strides count elements.
struct Tensor {
    void* data;
    int64_t batch_stride;
    int64_t token_stride;

    template <typename Number>
    Number* at(int64_t batch, int64_t token, int64_t channel) const {
        return static_cast<Number*>(data) + batch * batch_stride + token * token_stride + channel;
    }
};

// Spreads one number per head over the lanes of a block of channels.
class Heads {
public:
    Heads(int64_t channel, int64_t channels, int64_t heads)
        : first(channel), own(heads == channels), count(LANES), of{} {
        if (own) {
            count = channels - channel < LANES ? channels - channel : LANES;
            return;
        }
        int64_t group = channels / heads;
        first = channel / group;
        if (first + LANES > heads) first = heads > LANES ? heads - LANES : 0;
        if (heads < LANES) count = heads;
        for (int lane = 0; lane < LANES; ++lane) {
            int64_t at = channel + lane < channels ? channel + lane : channels - 1;
            of[lane] = at / group - first;
        }
    }

    // Returns for each lane the number of its head.
    template <typename Number>
    INLINE Vector spread(const Number* elements) const {
        Vector x = load(elements + first, count);
        return own ? x : pick(x, of);
    }

    int64_t first;  // the first head of the block

private:
    bool own;  // one head per channel
    int count;
    Integers of;
};

// What Python hands over: tensors [B, T, D] with strides of their own, and the sizes of a call.

#pragma once

#include "vectors.h"

// Numbers lie side by side along the channels; strides count numbers.
struct Tensor {
    void* data;
    int64_t batch_stride;
    int64_t token_stride;

    template <typename Number>
    Number* at(int64_t batch, int64_t token, int64_t channel) const {
        return static_cast<Number*>(data) + batch * batch_stride + token * token_stride + channel;
    }
};

// What numbers of heads say to the lanes of a block of channels.
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

    // For each lane the number of its head.
    template <typename Number>
    INLINE Vector spread(const Number* numbers) const {
        Vector x = load(numbers + first, count);
        return own ? x : pick(x, of);
    }

    int64_t first;  // number of a head

private:
    bool own;  // a head for every channel
    int count;
    Integers of;
};

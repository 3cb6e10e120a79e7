// Holds the card back by a number of its clock's ticks: calls that are queued meanwhile then follow each other as in a
// captured graph, and what they take is not what the host takes to queue them.
#include "scalar.cuh"

struct Arguments {
    i64 ticks;
};

extern "C" __global__ void hold(const Arguments a) {
    const i64 first = clock64();
    while (clock64() - first < a.ticks) {
    }
}

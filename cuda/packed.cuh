// Elements side by side as words: a register holds as many as it can, until one is taken out.
#pragma once
#include "types.cuh"

template <int NBYTES> struct WordOf { typedef u32 type; };
template <> struct WordOf<1> { typedef u8 type; };
template <> struct WordOf<2> { typedef u16 type; };

template <class T, int N> union Packed {
    typedef typename WordOf<N * sizeof(T)>::type Word;
    Vector<Word, N * sizeof(T) / sizeof(Word)> words;
    Vector<T, N> elements;

    // From a place where such a vector may begin; none there: zeros.
    __device__ void load(const void* from, bool there = true) {
        words = there ? *static_cast<const decltype(words)*>(from) : decltype(words){};
    }
    // Unpacked elements do not stay in registers: later code unpacks them again.
    __device__ void forget() {
#ifndef FOREPLAN_SHIM
#pragma unroll
        for (Word& word : words.at) {
            if constexpr (sizeof(Word) == 4) asm volatile("" : "+r"(word) : : "memory");
            if constexpr (sizeof(Word) == 2) asm volatile("" : "+h"(word) : : "memory");
        }
#endif
    }
};

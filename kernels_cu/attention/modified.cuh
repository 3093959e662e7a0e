// Scores as a user's mods make them (mods.cuh), before anything is added to them.
#ifndef CUPYFLASH_MODIFIED_CUH
#define CUPYFLASH_MODIFIED_CUH
#include "attention/mods.cuh"
#include "attention/sequence.cuh"

// Whether a mod changes the scores that it does not hide. (What has mods has kBias, too: their scores may be -inf.)
template <class V>
constexpr bool is_score_modded() {
    if constexpr (!V::kBias) return false;
    else if constexpr (V::kMods) return V::kScoreMod;
    else return false;
}

// The mods of a head: of() it; from() a query and a key on. Without mods nothing is left of all this.
template <class V, bool kMods = V::kMods>
struct Modified {
    struct At {
        __device__ float modified(float s) const { return s; }
        __device__ bool hides() const { return false; }
    };

    template <class Params>
    __device__ static Modified of(const Params &, const Sequence<V::kPacked> &, int /* head */) {
        return {};
    }
    __device__ Modified from(int /* query */, int /* key */) const { return {}; }
    __device__ At operator()(int /* queries */, int /* keys */) const { return {}; }
};

template <class V>
struct Modified<V, true> {
    struct At {
        typename V::Mods mods;
        int sequence, head;
        mods::Place query, key;

        // A key that is hidden is so whatever its score is: by the mask, or by a score_mod that gives -inf to 0, to 1 and -1,
        // and to 2^10 and -2^10.
        __device__ bool hides() const {
            if (is_masked()) return true;
            const auto hides_both = [&](float s) { return of(s) == -ptx::infinity() && of(-s) == -ptx::infinity(); };
            // @hidden-by-all-scores
            return V::kScoreMod && hides_both(1.f) && hides_both(1024.f) && of(0.f) == -ptx::infinity();
        }
        __device__ float modified(float s) const { return is_masked() ? -ptx::infinity() : of(s); }
        // d modified / d s.
        __device__ float derivative(float s) const {
            if constexpr (V::kScoreMod) return of(mods::Dual(s, 1.f)).d;
            else return 1.f;
        }

      private:
        __device__ bool is_masked() const {
            if constexpr (V::kMaskMod) return !mods.mask_mod(sequence, head, query, key);  // @hidden-by-mask-mod
            else return false;
        }
        template <class Number>
        __device__ Number of(Number s) const {
            if constexpr (V::kScoreMod) return mods.score_mod(s, sequence, head, query, key);  // @score-of-its-place
            else return s;
        }
    };
    At first;

    template <class Params>
    __device__ static Modified of(const Params &p, const Sequence<V::kPacked> &s, int head) {
        return {{typename V::Mods(p), s.index, head, 0, 0}};  // @sequence-and-head-of-mods
    }
    __device__ Modified from(int query, int key) const {
        return {{first.mods, first.sequence, first.head, query, key}};
    }
    __device__ At operator()(int i, int j) const {
        return {first.mods, first.sequence, first.head, {first.query.from, i}, {first.key.from, j}};
    }
};

#endif  // CUPYFLASH_MODIFIED_CUH

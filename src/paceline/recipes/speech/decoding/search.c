/* Beam search over CTC log-probabilities of one utterance, with an n-gram model, hot words and word bonus.
 *
 * Compiled at first use, for the CPU by a C compiler (one utterance per thread) and for GPUs by NVRTC (one utterance per
 * warp): native.py. The same search in Python is in search.py, which says what is searched. Plain C99 and C++ alike; no
 * library but the mathematical functions, nothing global.
 */
#ifdef __CUDACC_RTC__
typedef unsigned long long uint64_t;
typedef long long int64_t;
typedef int int32_t;
typedef unsigned char uint8_t;
#define FUNCTION static __device__
#define INFINITY __longlong_as_double(0x7ff0000000000000LL)
#else
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#define FUNCTION static
#endif

#define MAX_HISTORY 9
#define TOO_MANY_LABELS (-2)
#define LN10 2.302585092994045684

typedef struct { uint64_t key; double partial; int32_t word, hot; } Slot;

/* Asks Python for a word's log-probability (base 10) and the next state, where the model has no tables. */
typedef double (*Advance)(int64_t state, int64_t word, int64_t *next);

/* Everything that a search knows; native.py fills it, every field has 8 bytes. */
typedef struct {
    int64_t num_labels;              /* the blank is the label after the last */
    const int64_t *piece_hash, *piece_power, *piece_length;
    const uint8_t *starts;
    int64_t num_slots;               /* power of two; 0 without words */
    const Slot *slots;
    int64_t has_model, order, boundary, num_words, start, end, unknown;
    const float *unigrams;
    const int64_t *keys, *first;     /* first: the first key of each node */
    const float *log_probs;
    const int32_t *nexts;
    const float *backoffs;
    const int32_t *fails;
    Advance advance;
    double weight, bonus, unknown_offset, hotword_weight;
    int64_t width, prune_history, num_wanted, max_tokens;
    double prune, least, floor_log_prob;
} Decoder;

typedef struct {
    double acoustic, path, lm, hot, partial;  /* acoustic: of all paths; path: of the best one, whose times are told */
    uint64_t text, part, done_text;  /* done_text: with the word finished */
    int64_t state;
    int32_t part_length, part_word, part_hot, last, trace;
    int32_t is_done;                 /* done_* hold what finishing the word gives */
    double done_lm, done_hot;
    int64_t done_state;
    uint64_t history[MAX_HISTORY];
    uint64_t past;                   /* hash of the last words */
} Beam;

/* A beam continued by a label, before it is known to be worth making. */
typedef struct {
    double acoustic, path, partial, score;
    uint64_t text, part;
    int32_t from, label, kind, trace, part_word, part_hot, part_length, unused;
} Candidate;

typedef struct { uint64_t key; int32_t stamp, place; } Mark;

enum { SAME, STARTS, GROWS };

FUNCTION uint64_t mixed(uint64_t value) {
    value ^= value >> 32; value *= 0xD6E8FEB86659FD93u;
    value ^= value >> 32; value *= 0xD6E8FEB86659FD93u;
    return value ^ (value >> 32);
}

FUNCTION const Slot *find_word(const Decoder *d, uint64_t hash) {
    if (!d->num_slots) return NULL;
    uint64_t place = mixed(hash) & (d->num_slots - 1);
    while (d->slots[place].word != -2) {
        if (d->slots[place].key == hash) return &d->slots[place];
        place = (place + 1) & (d->num_slots - 1);
    }
    return NULL;
}

FUNCTION double word_log_prob(const Decoder *d, int64_t state, int64_t word, int64_t *next) {
#ifndef __CUDACC_RTC__
    if (d->advance) return d->advance(state, word, next);
#endif
    double result = 0;
    while (state > 0) {
        int64_t low = d->first[state], high = d->first[state + 1], end = high;
        int64_t wanted = state * d->num_words + word;
        while (low < high) {
            int64_t middle = low + (high - low) / 2;
            if (d->keys[middle] < wanted) low = middle + 1; else high = middle;
        }
        if (low < end && d->keys[low] == wanted) { *next = d->nexts[low]; return result + d->log_probs[low]; }
        result += d->backoffs[state];
        state = d->fails[state];
    }
    *next = d->order > 1 ? 1 + word : 0;
    return result + d->unigrams[word];
}

/* Score of a word (weighted, natural logarithm) after a state; word -1 is none that the model knows. */
FUNCTION double word_score(const Decoder *d, int64_t state, int32_t word, int is_last, int64_t *next) {
    double found = word_log_prob(d, state, word < 0 ? d->unknown : word, next);
    if (word < 0) found += d->unknown_offset;
    if (is_last && d->boundary) { int64_t after; found += word_log_prob(d, *next, d->end, &after); }
    return d->weight * found * LN10 + d->bonus;
}

FUNCTION void look_at_part(const Decoder *d, Candidate *one) {
    one->part_word = -1; one->part_hot = 0; one->partial = 0;
    if (!one->part_length) return;
    const Slot *slot = find_word(d, one->part);
    if (slot) { one->part_word = slot->word; one->part_hot = slot->hot; one->partial = slot->partial; return; }
    if (d->has_model) {
        one->partial = d->unknown_offset;
        if (one->part_length > 6) one->partial = one->partial * one->part_length / 6;
    }
}

FUNCTION uint64_t longer(uint64_t text, uint64_t word) { return mixed(text * 0x9FB21C651E98DF25u + word); }

/* What finishing its word gives a beam. */
FUNCTION void score_done(const Decoder *d, Beam *beam) {
    if (beam->is_done) return;
    beam->is_done = 1;
    beam->done_lm = beam->lm; beam->done_state = beam->state; beam->done_hot = beam->hot;
    if (!beam->part_length) return;
    if (beam->part_hot) beam->done_hot += d->hotword_weight;
    if (d->has_model) beam->done_lm += word_score(d, beam->state, beam->part_word, 0, &beam->done_state);
}

/* A beam with the word of `from` finished. */
FUNCTION void finish_word(const Beam *from, Beam *to, int num_history) {
    to->lm = from->done_lm; to->state = from->done_state; to->hot = from->done_hot;
    if (!from->part_length) return;
    for (int i = num_history - 1; i > 0; i--) to->history[i] = from->history[i - 1];
    to->history[0] = from->part;
    uint64_t past = 0;
    for (int i = 0; i < num_history; i++) past = mixed(past * 0x9FB21C651E98DF25u + to->history[i]);
    to->past = past;
}

FUNCTION double log_add(double one, double other) {
    return one >= other ? one + log1p(exp(other - one)) : other + log1p(exp(one - other));
}

/* Index of the same key seen before under this stamp, or -1 after noting `place`. */
FUNCTION int32_t seen(Mark *marks, int64_t num_marks, uint64_t key, int32_t stamp, int32_t place) {
    uint64_t at = key & (num_marks - 1);
    while (marks[at].stamp == stamp) {
        if (marks[at].key == key) return marks[at].place;
        at = (at + 1) & (num_marks - 1);
    }
    marks[at].key = key; marks[at].stamp = stamp; marks[at].place = place;
    return -1;
}

/* Numbers of the best, best first; those equal in score in the order they come. */
FUNCTION int32_t best_of(const Candidate *beams, int32_t count, int32_t width, double prune, int32_t *order) {
    double most = -INFINITY;
    for (int32_t i = 0; i < count; i++) if (beams[i].score > most) most = beams[i].score;
    int32_t num = 0;
    for (int32_t i = 0; i < count; i++) {
        double score = beams[i].score;
        if (!(score >= most + prune)) continue;
        if (num == width && score <= beams[order[num - 1]].score) continue;
        int32_t at = num < width ? num++ : num - 1;
        while (at > 0 && beams[order[at - 1]].score < score) { order[at] = order[at - 1]; at--; }
        order[at] = i;
    }
    return num;
}

FUNCTION int64_t num_marks_of(const Decoder *d) {
    int64_t found = 64;
    while (found < 4 * d->width) found *= 2;
    return found;
}

/* Bytes that the search of so many frames works in; `_room` of native.py, where memory comes from torch. */
FUNCTION int64_t room_of(const Decoder *d, int64_t frames) {
    return 2 * d->width * (int64_t)sizeof(Beam) + d->max_tokens * d->width * (int64_t)sizeof(Candidate)
        + num_marks_of(d) * (int64_t)sizeof(Mark) + 8 * (frames * d->width + 1) + 8 * d->width + 8 * d->max_tokens;
}

/* Searches one utterance. `log_probs` has `frames` rows of labels. Writes up to `num_wanted` results, best first: the
 * label of each frame (`paths`, `path_stride` apart) and three scores each (combined, acoustic, language model). Returns
 * how many there are, or TOO_MANY_LABELS where a row has more probable ones than rows of probabilities can, for which
 * there is no room. `room` is zeroed. */
FUNCTION int32_t search(
    const Decoder *d, const float *log_probs, int64_t frames, char *room, int32_t *paths, int64_t path_stride, double *scores)
{
    const int32_t blank = (int32_t)d->num_labels, classes = blank + 1, width = (int32_t)d->width;
    const double prune = d->prune, least = d->least, floor_log_prob = d->floor_log_prob;
    int num_history = d->has_model && d->order > 2 ? (int)d->order - 1 : 1;
    if (num_history > MAX_HISTORY) num_history = MAX_HISTORY;
    const int64_t num_marks = num_marks_of(d);
    Beam *beams = (Beam *)room, *kept = beams + width;
    Candidate *cands = (Candidate *)(kept + width);
    Mark *marks = (Mark *)(cands + d->max_tokens * width);
    int32_t *parents = (int32_t *)(marks + num_marks), *labels = parents + frames * width + 1;
    int32_t *order = labels + frames * width + 1, *tokens = order + 2 * width;
    int32_t stamp = 0, num = 1, sole = -1;
    /* More than any look-up can add to a score. */
    double slack = (d->bonus > 0 ? d->bonus : 0) + (d->hotword_weight > 0 ? 2 * d->hotword_weight : 0);
    if (d->weight < 0 || d->unknown_offset > 0) slack = INFINITY;
    if (!d->has_model) slack -= d->bonus > 0 ? d->bonus : 0;
    beams[0].last = -1; beams[0].part_word = -1; beams[0].text = beams[0].done_text = 1; beams[0].state = d->start; beams[0].trace = -1;
    for (int64_t frame = 0; frame < frames; frame++) {
        const float *row = log_probs + frame * classes;
        int32_t num_tokens = 0, most = 0;
        for (int32_t c = 0; c < classes; c++) {
            if (row[c] > row[most]) most = c;
            if (!(row[c] >= least)) continue;
            if (num_tokens == d->max_tokens) return TOO_MANY_LABELS;
            tokens[num_tokens++] = c;
        }
        if (row[most] < least) tokens[num_tokens++] = most;
        int64_t base = frame * width;
        if (num_tokens == 1 && tokens[0] == sole) {  /* every beam ends in this label already: nothing but scores moves */
            double p = row[sole] < floor_log_prob ? floor_log_prob : row[sole] > 0 ? 0 : row[sole];
            for (int32_t i = 0; i < num; i++) {
                beams[i].acoustic += p; beams[i].path += p;
                parents[base + i] = beams[i].trace; labels[base + i] = sole; beams[i].trace = (int32_t)(base + i);
            }
            continue;
        }
        sole = num_tokens == 1 ? tokens[0] : -1;
        /* Paths that come to the same text, word and label are one; that label is the same, so look per label. */
        int32_t count = 0;
        for (int32_t t = 0; t < num_tokens; t++) {
            int32_t c = tokens[t], starts = c != blank && d->starts[c];
            double p = row[c] < floor_log_prob ? floor_log_prob : row[c] > 0 ? 0 : row[c];
            stamp++;
            for (int32_t i = 0; i < num; i++) {
                const Beam *from = &beams[i];
                int32_t kind = c == blank || from->last == c ? SAME : starts ? STARTS : GROWS;
                uint64_t text = from->text, part = from->part;
                if (kind == STARTS) {
                    text = from->done_text;
                    part = (uint64_t)d->piece_hash[c];
                } else if (kind == GROWS) {
                    part = part * (uint64_t)d->piece_power[c] + (uint64_t)d->piece_hash[c];
                }
                int32_t same = seen(marks, num_marks, mixed(text * 0x9FB21C651E98DF25u + part), stamp, count);
                if (same >= 0) {
                    cands[same].acoustic = log_add(cands[same].acoustic, from->acoustic + p);
                    if (from->path + p > cands[same].path) {
                        cands[same].path = from->path + p;
                        cands[same].trace = from->trace;
                    }
                    continue;
                }
                Candidate *to = &cands[count++];
                to->acoustic = from->acoustic + p; to->path = from->path + p;
                to->text = text; to->part = part;
                to->from = i; to->label = c; to->kind = kind; to->trace = from->trace;
            }
        }
        /* Scores: first those that need no look-up, then of the others only those that can still be kept. */
        double most_score = -INFINITY;
        for (int32_t i = 0; i < count; i++) {
            Candidate *one = &cands[i];
            const Beam *from = &beams[one->from];
            if (one->kind != SAME) continue;
            one->score = one->acoustic + from->lm + from->hot + from->partial;
            if (one->score > most_score) most_score = one->score;
        }
        for (int32_t i = 0; i < count; i++) {
            Candidate *one = &cands[i];
            Beam *from = &beams[one->from];
            if (one->kind == SAME) continue;
            one->score = -INFINITY;
            if (one->acoustic + from->lm + from->hot + slack < most_score + prune) continue;
            one->part_length = d->piece_length[one->label] + (one->kind == GROWS ? from->part_length : 0);
            look_at_part(d, one);
            if (one->kind == STARTS) score_done(d, from);
            double before = one->kind == STARTS ? from->done_lm + from->done_hot : from->lm + from->hot;
            one->score = one->acoustic + before + one->partial;
            if (one->score > most_score) most_score = one->score;
        }
        int32_t chosen = best_of(cands, count, width, prune, order), next = 0;
        stamp++;
        for (int32_t i = 0; i < chosen; i++) {
            const Candidate *one = &cands[order[i]];
            const Beam *from = &beams[one->from];
            Beam *to = &kept[next];
            *to = *from;
            to->acoustic = one->acoustic; to->path = one->path; to->last = one->label; to->text = one->text; to->part = one->part;
            if (one->kind == STARTS) finish_word(from, to, num_history);
            if (one->kind != SAME) {
                to->part_length = one->part_length; to->part_word = one->part_word; to->part_hot = one->part_hot;
                to->partial = one->partial; to->is_done = 0;
                to->done_text = to->part_length ? longer(to->text, to->part) : to->text;
            }
            if (d->prune_history) {
                uint64_t key = mixed(mixed(to->past * 0x9FB21C651E98DF25u + to->part) + (uint64_t)(to->last + 2));
                if (seen(marks, num_marks, key, stamp, i) >= 0) continue;
            }
            parents[base + next] = one->trace; labels[base + next] = one->label;
            to->trace = (int32_t)(base + next);
            next++;
        }
        Beam *swap = beams; beams = kept; kept = swap;
        num = next;
    }
    /* The last word. Of texts that become one, the last is scored: it may end in a space, then its last word is none. */
    int32_t count = 0;
    stamp++;
    for (int32_t i = 0; i < num; i++) {
        const Beam *from = &beams[i];
        int32_t same = seen(marks, num_marks, mixed(from->done_text), stamp, count);
        Candidate *to = same >= 0 ? &cands[same] : &cands[count++];
        to->acoustic = same >= 0 ? log_add(to->acoustic, from->acoustic) : from->acoustic;
        to->from = i;
        if (same < 0 || from->path > to->path) { to->path = from->path; to->trace = from->trace; }
    }
    for (int32_t i = 0; i < count; i++) {
        Candidate *one = &cands[i];
        const Beam *from = &beams[one->from];
        double hot = from->part_length && from->part_hot ? from->hot + d->hotword_weight : from->hot;
        int64_t next;
        one->partial = from->lm;  /* the language model's part, from here on */
        if (d->has_model) one->partial += word_score(d, from->state, from->part_length ? from->part_word : -1, 1, &next);
        one->score = one->acoustic + one->partial + hot;
    }
    int32_t result = best_of(cands, count, width, prune, order);
    if (result > d->num_wanted) result = (int32_t)d->num_wanted;
    for (int32_t i = 0; i < result; i++) {
        const Candidate *one = &cands[order[i]];
        scores[3 * i] = one->score; scores[3 * i + 1] = one->acoustic; scores[3 * i + 2] = one->partial;
        int32_t at = one->trace;
        for (int64_t frame = frames - 1; frame >= 0; frame--) { paths[i * path_stride + frame] = labels[at]; at = parents[at]; }
    }
    return result;
}

#ifdef __CUDACC_RTC__
extern "C" __global__ void paceline_search(
    const Decoder *d, const float *log_probs, const int64_t *lengths, const int64_t *sizes, char *room, int32_t *paths,
    double *scores, int32_t *counts)
{
    /* sizes: frames of the longest utterance, bytes of room for one */
    const int64_t number = blockIdx.x, frames = sizes[0];
    if (threadIdx.x) return;
    counts[number] = search(d, log_probs + number * frames * (d->num_labels + 1), lengths[number],
        room + number * sizes[1], paths + number * d->num_wanted * frames, frames, scores + number * d->num_wanted * 3);
}
#else
/* Returns -1 without memory, else what `search` does. */
int32_t paceline_search(const Decoder *d, const float *log_probs, int64_t frames, int32_t *paths, double *scores) {
    char *room = (char *)calloc(1, (size_t)room_of(d, frames));
    if (!room) return -1;
    int32_t found = search(d, log_probs, frames, room, paths, frames, scores);
    free(room);
    return found;
}
#endif

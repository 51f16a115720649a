/* Beam search over CTC log-probabilities of one utterance, with an n-gram model, hot words and word bonus.
 *
 * Compiled at first use (native.py); the same search in tensors is in search.py, which says what is searched.
 * Plain C99: no library but libm, nothing global, so that threads may search at the same time.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MAX_HISTORY 9
#define LN10 2.302585092994045684

typedef struct { uint64_t key; int32_t word; int32_t hot; double partial; } Slot;

/* Asks Python for a word's log-probability (base 10) and the next state, where the model has no tables. */
typedef double (*Advance)(int64_t state, int64_t word, int64_t *next);

typedef struct {
    int32_t num_labels;              /* the blank is the label after the last */
    const int64_t *piece_hash, *piece_power;
    const int32_t *piece_length;
    const uint8_t *starts;
    /* words */
    int64_t num_slots;               /* power of two; 0 without words */
    Slot *slots;
    /* language model */
    int32_t has_model, order, boundary;
    int64_t num_words, num_keys, num_nodes, start, end, unknown;
    const float *unigrams, *log_probs, *backoffs;
    const int64_t *keys;
    const int32_t *nexts, *fails;
    int64_t *first;                  /* first key of each node */
    Advance advance;
    double weight, bonus, unknown_offset, hotword_weight;
} Decoder;

typedef struct {
    double acoustic, lm, hot, partial;
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
    double acoustic, partial, score;
    uint64_t text, part;
    int32_t from, label, kind, trace, part_word, part_hot, part_length;
} Candidate;

enum { SAME, STARTS, GROWS };

static uint64_t mixed(uint64_t value) {
    value ^= value >> 32; value *= 0xD6E8FEB86659FD93u;
    value ^= value >> 32; value *= 0xD6E8FEB86659FD93u;
    return value ^ (value >> 32);
}

Decoder *paceline_decoder_new(
    int32_t num_labels, const int64_t *piece_hash, const int64_t *piece_power, const int32_t *piece_length,
    const uint8_t *starts, int64_t num_hashes, const int64_t *hashes, const int32_t *words, const double *partials,
    const uint8_t *is_hot, double weight, double bonus, double unknown_offset, double hotword_weight)
{
    Decoder *made = calloc(1, sizeof *made);
    if (!made) return NULL;
    made->num_labels = num_labels;
    made->piece_hash = piece_hash; made->piece_power = piece_power;
    made->piece_length = piece_length; made->starts = starts;
    made->weight = weight; made->bonus = bonus;
    made->unknown_offset = unknown_offset; made->hotword_weight = hotword_weight;
    made->order = 1;
    if (num_hashes) {
        made->num_slots = 16;
        while (made->num_slots < 2 * num_hashes) made->num_slots *= 2;
        made->slots = calloc(made->num_slots, sizeof(Slot));
        if (!made->slots) { free(made); return NULL; }
        for (int64_t i = 0; i < made->num_slots; i++) made->slots[i].word = -2;  /* free */
        for (int64_t i = 0; i < num_hashes; i++) {
            uint64_t place = mixed((uint64_t)hashes[i]) & (made->num_slots - 1);
            while (made->slots[place].word != -2) place = (place + 1) & (made->num_slots - 1);
            made->slots[place] = (Slot){(uint64_t)hashes[i], words[i], is_hot[i], partials[i]};
        }
    }
    return made;
}

int paceline_decoder_model(
    Decoder *made, int32_t order, int32_t boundary, int64_t num_words, int64_t start, int64_t end, int64_t unknown,
    const float *unigrams, int64_t num_keys, const int64_t *keys, const float *log_probs, const int32_t *nexts,
    int64_t num_nodes, const float *backoffs, const int32_t *fails, Advance advance)
{
    made->has_model = 1; made->order = order; made->boundary = boundary;
    made->num_words = num_words; made->start = start; made->end = end; made->unknown = unknown;
    made->unigrams = unigrams; made->num_keys = num_keys; made->keys = keys;
    made->log_probs = log_probs; made->nexts = nexts; made->backoffs = backoffs; made->fails = fails;
    made->num_nodes = num_nodes; made->advance = advance;
    if (advance) return 0;
    made->first = malloc((num_nodes + 1) * sizeof(int64_t));
    if (!made->first) return 1;
    int64_t place = 0;
    for (int64_t node = 0; node <= num_nodes; node++) {
        while (place < num_keys && keys[place] < node * num_words) place++;
        made->first[node] = place;
    }
    return 0;
}

void paceline_decoder_free(Decoder *made) {
    if (!made) return;
    free(made->slots); free(made->first); free(made);
}

static const Slot *find_word(const Decoder *d, uint64_t hash) {
    if (!d->num_slots) return NULL;
    uint64_t place = mixed(hash) & (d->num_slots - 1);
    while (d->slots[place].word != -2) {
        if (d->slots[place].key == hash) return &d->slots[place];
        place = (place + 1) & (d->num_slots - 1);
    }
    return NULL;
}

static double word_log_prob(const Decoder *d, int64_t state, int64_t word, int64_t *next) {
    if (d->advance) return d->advance(state, word, next);
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
static double word_score(const Decoder *d, int64_t state, int32_t word, int is_last, int64_t *next) {
    double found = word_log_prob(d, state, word < 0 ? d->unknown : word, next);
    if (word < 0) found += d->unknown_offset;
    if (is_last && d->boundary) { int64_t after; found += word_log_prob(d, *next, d->end, &after); }
    return d->weight * found * LN10 + d->bonus;
}

static void look_at_part(const Decoder *d, Candidate *one) {
    one->part_word = -1; one->part_hot = 0; one->partial = 0;
    if (!one->part_length) return;
    const Slot *slot = find_word(d, one->part);
    if (slot) { one->part_word = slot->word; one->part_hot = slot->hot; one->partial = slot->partial; return; }
    if (d->has_model) {
        one->partial = d->unknown_offset;
        if (one->part_length > 6) one->partial = one->partial * one->part_length / 6;
    }
}

static uint64_t longer(uint64_t text, uint64_t word) { return mixed(text * 0x9FB21C651E98DF25u + word); }

/* What finishing its word gives a beam. */
static void score_done(const Decoder *d, Beam *beam) {
    if (beam->is_done) return;
    beam->is_done = 1;
    beam->done_lm = beam->lm; beam->done_state = beam->state; beam->done_hot = beam->hot;
    if (!beam->part_length) return;
    if (beam->part_hot) beam->done_hot += d->hotword_weight;
    if (d->has_model) beam->done_lm += word_score(d, beam->state, beam->part_word, 0, &beam->done_state);
}

/* A beam with the word of `from` finished. */
static void finish_word(const Beam *from, Beam *to, int num_history) {
    to->lm = from->done_lm; to->state = from->done_state; to->hot = from->done_hot;
    if (!from->part_length) return;
    for (int i = num_history - 1; i > 0; i--) to->history[i] = from->history[i - 1];
    to->history[0] = from->part;
    uint64_t past = 0;
    for (int i = 0; i < num_history; i++) past = mixed(past * 0x9FB21C651E98DF25u + to->history[i]);
    to->past = past;
}

static double log_add(double one, double other) {
    return one >= other ? one + log1p(exp(other - one)) : other + log1p(exp(one - other));
}

typedef struct { uint64_t key; int32_t stamp, place; } Mark;

/* Index of the same key seen before under this stamp, or -1 after noting `place`. */
static int32_t seen(Mark *marks, int64_t num_marks, uint64_t key, int32_t stamp, int32_t place) {
    uint64_t at = key & (num_marks - 1);
    while (marks[at].stamp == stamp) {
        if (marks[at].key == key) return marks[at].place;
        at = (at + 1) & (num_marks - 1);
    }
    marks[at] = (Mark){key, stamp, place};
    return -1;
}

/* Numbers of the best, best first; those equal in score in the order they come. */
static int32_t best_of(const Candidate *beams, int32_t count, int32_t width, double prune, int32_t *order) {
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

/* Searches one utterance. `log_probs` has `frames` rows, `stride` numbers apart. Writes up to `num_wanted` results, best
 * first: the label of each frame (`paths`, frames apart) and three scores each (combined, acoustic, language model).
 * Returns how many there are, or -1 without memory. */
int32_t paceline_decode(
    const Decoder *d, const float *log_probs, int64_t frames, int64_t stride, int32_t width, double prune,
    double least, double floor_log_prob, int32_t prune_history, int32_t num_wanted, int32_t *paths, double *scores)
{
    const int32_t blank = d->num_labels, classes = blank + 1;
    int num_history = d->has_model && d->order > 2 ? d->order - 1 : 1;
    if (num_history > MAX_HISTORY) num_history = MAX_HISTORY;
    int64_t num_marks = 64;
    while (num_marks < 4 * (int64_t)width) num_marks *= 2;
    int32_t *tokens = malloc(classes * sizeof *tokens);
    Beam *beams = malloc(width * sizeof *beams), *kept = malloc(width * sizeof *kept);
    int64_t room = (int64_t)width * 8;
    Candidate *cands = malloc(room * sizeof *cands);
    int32_t *order = malloc(width * sizeof *order);
    Mark *marks = calloc(num_marks, sizeof *marks);
    int32_t *parents = malloc((frames * width + 1) * sizeof *parents), *labels = malloc((frames * width + 1) * sizeof *labels);
    int32_t result = -1, stamp = 0, num = 1, sole = -1;
    if (!tokens || !beams || !kept || !cands || !order || !marks || !parents || !labels) goto done;
    /* More than any look-up can add to a score. */
    double slack = (d->bonus > 0 ? d->bonus : 0) + (d->hotword_weight > 0 ? 2 * d->hotword_weight : 0);
    if (d->weight < 0 || d->unknown_offset > 0) slack = INFINITY;
    if (!d->has_model) slack -= d->bonus > 0 ? d->bonus : 0;
    memset(beams, 0, sizeof *beams);
    beams[0].last = -1; beams[0].part_word = -1; beams[0].text = beams[0].done_text = 1; beams[0].state = d->start; beams[0].trace = -1;
    for (int64_t frame = 0; frame < frames; frame++) {
        const float *row = log_probs + frame * stride;
        int32_t num_tokens = 0, most = 0;
        for (int32_t c = 0; c < classes; c++) {
            if (row[c] > row[most]) most = c;
            if (row[c] >= least) tokens[num_tokens++] = c;
        }
        if (row[most] < least) tokens[num_tokens++] = most;
        int64_t base = frame * width;
        if (num_tokens == 1 && tokens[0] == sole) {  /* every beam ends in this label already: nothing but scores moves */
            double p = row[sole] < floor_log_prob ? floor_log_prob : row[sole] > 0 ? 0 : row[sole];
            for (int32_t i = 0; i < num; i++) {
                beams[i].acoustic += p;
                parents[base + i] = beams[i].trace; labels[base + i] = sole; beams[i].trace = (int32_t)(base + i);
            }
            continue;
        }
        sole = num_tokens == 1 ? tokens[0] : -1;
        if (room < (int64_t)num_tokens * num) {
            room = (int64_t)num_tokens * width;
            free(cands);
            cands = malloc(room * sizeof *cands);
            if (!cands) goto done;
        }
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
                    cands[same].trace = from->trace;
                    continue;
                }
                Candidate *to = &cands[count++];
                to->acoustic = from->acoustic + p;
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
            to->acoustic = one->acoustic; to->last = one->label; to->text = one->text; to->part = one->part;
            if (one->kind == STARTS) finish_word(from, to, num_history);
            if (one->kind != SAME) {
                to->part_length = one->part_length; to->part_word = one->part_word; to->part_hot = one->part_hot;
                to->partial = one->partial; to->is_done = 0;
                to->done_text = to->part_length ? longer(to->text, to->part) : to->text;
            }
            if (prune_history) {
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
        to->from = i; to->trace = from->trace;
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
    result = best_of(cands, count, width, prune, order);
    if (result > num_wanted) result = num_wanted;
    for (int32_t i = 0; i < result; i++) {
        const Candidate *one = &cands[order[i]];
        scores[3 * i] = one->score; scores[3 * i + 1] = one->acoustic; scores[3 * i + 2] = one->partial;
        int32_t at = one->trace;
        for (int64_t frame = frames - 1; frame >= 0; frame--) { paths[i * frames + frame] = labels[at]; at = parents[at]; }
    }
done:
    free(tokens); free(beams); free(kept); free(cands); free(order); free(marks); free(parents); free(labels);
    return result;
}

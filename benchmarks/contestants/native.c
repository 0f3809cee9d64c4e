/* One exchange in shared memory, without Python: a server that adds gradients to weights, and workers that wait for it.

   Each worker has a slot: a word that counts its requests, one that counts the server's replies, its gradients, and the
   weights as of its last reply. The server sleeps on one word that every request changes. */

#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef struct {
    _Atomic uint32_t requests;
    _Atomic uint32_t replies;
} slot_t;

static void await_change(_Atomic uint32_t *word, uint32_t seen) {
    while (atomic_load(word) == seen)
        syscall(SYS_futex, word, FUTEX_WAIT, seen, NULL, NULL, 0);
}

static void wake(_Atomic uint32_t *word) {
    syscall(SYS_futex, word, FUTEX_WAKE, 1, NULL, NULL, 0);
}

/* Serves until every worker has set its request word to the largest number. */
void serve(_Atomic uint32_t *bell, slot_t *slots, float *gradients, float *replies, float *weights, int workers,
           long elements, float rate) {
    for (int left = workers; left;) {
        uint32_t seen = atomic_load(bell);
        int served = 0;
        for (int worker = 0; worker < workers; worker++) {
            uint32_t request = atomic_load(&slots[worker].requests);
            if (request == atomic_load(&slots[worker].replies))
                continue;
            served++;
            if (request == UINT32_MAX) {
                left--;
            } else {
                const float *own = gradients + worker * elements;
                for (long each = 0; each < elements; each++)
                    weights[each] -= rate * own[each];
                memcpy(replies + worker * elements, weights, elements * sizeof(float));
            }
            atomic_store(&slots[worker].replies, request);
            wake(&slots[worker].replies);
        }
        if (!served)
            await_change(bell, seen);
    }
}

/* One worker's push and pull; with no gradients, its last. */
void exchange(_Atomic uint32_t *bell, slot_t *slot, float *shared_gradients, const float *shared_weights,
              const float *gradients, float *weights, long elements) {
    uint32_t before = atomic_load(&slot->replies);
    if (gradients)
        memcpy(shared_gradients, gradients, elements * sizeof(float));
    atomic_store(&slot->requests, gradients ? before + 1 : UINT32_MAX);
    atomic_fetch_add(bell, 1);
    wake(bell);
    await_change(&slot->replies, before);
    if (gradients)
        memcpy(weights, shared_weights, elements * sizeof(float));
}

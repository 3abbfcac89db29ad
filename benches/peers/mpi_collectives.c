// Times Open MPI's collectives: one JSON line for each operation and size, from rank 0.
//
//   mpicc -O2 mpi_collectives.c -o mpi_collectives
//   mpirun -n 2 mpi_collectives MAX_BYTES
//
// A sample is the time of some calls one after another, divided by their number; the median of the samples
// counts. Sizes are bytes of the whole buffer, in f32.
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SAMPLES = 7 };

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void call(const char *op, float *whole, float *part, int count, int rank, int size) {
    if (!strcmp(op, "all_reduce")) {
        MPI_Allreduce(MPI_IN_PLACE, whole, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    } else if (!strcmp(op, "all_gather")) {
        MPI_Allgather(MPI_IN_PLACE, 0, MPI_FLOAT, whole, count / size, MPI_FLOAT, MPI_COMM_WORLD);
    } else {
        MPI_Reduce_scatter_block(whole, part, count / size, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    }
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    int rank, size;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    size_t max = argc > 1 ? strtoull(argv[1], NULL, 10) : 256 << 20;
    const char *ops[] = {"all_reduce", "all_gather", "reduce_scatter"};
    float *whole = calloc(max, 1), *part = calloc(max / size + 64, 1);
    memset(whole, 0, max);
    memset(part, 0, max / size);
    for (int o = 0; o < 3; o++) {
        for (size_t bytes = 4096; bytes <= max; bytes *= 4) {
            int count = (int)(bytes / sizeof(float));
            int calls = bytes <= (1 << 16) ? 200 : bytes <= (4 << 20) ? 20 : bytes <= (16 << 20) ? 5 : 1;
            double samples[SAMPLES];
            for (int s = -1; s < SAMPLES; s++) { // the first is for warming up
                MPI_Barrier(MPI_COMM_WORLD);
                double start = MPI_Wtime();
                for (int i = 0; i < calls; i++) call(ops[o], whole, part, count, rank, size);
                if (s >= 0) samples[s] = (MPI_Wtime() - start) / calls;
            }
            qsort(samples, SAMPLES, sizeof(double), ascending);
            if (rank == 0) {
                printf("{\"op\": \"%s\", \"ranks\": %d, \"bytes\": %zu, \"seconds\": %.9f}\n", ops[o], size, bytes,
                       samples[SAMPLES / 2]);
                fflush(stdout);
            }
        }
    }
    free(whole);
    free(part);
    MPI_Finalize();
    return 0;
}

/* Writes the databases below tests/cli/peers/golden with the C++ libraries of LevelDB and RocksDB.
 *
 *   apt-get install gcc libleveldb-dev librocksdb-dev      # made with LevelDB 1.23 and RocksDB 7.8.3 of Debian 12
 *   gcc make_golden.c -lleveldb -lrocksdb -o make_golden && ./make_golden DIRECTORY
 *
 * The tests compute the same entries. LOCK, LOG and OPTIONS files are not kept.
 */
#include <leveldb/c.h>
#include <rocksdb/c.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static const char *root;

static void check(char *error) {
    if (error) {
        fprintf(stderr, "%s\n", error);
        exit(1);
    }
}

static char *path_of(const char *name) {
    static char path[4096];
    snprintf(path, sizeof path, "%s/%s", root, name);
    return path;
}

typedef void (*Put)(void *target, const char *key, size_t key_len, const char *value, size_t value_len);
typedef void (*Delete)(void *target, const char *key, size_t key_len);

/* Entries first..last; every 7th is deleted, every 11th is overwritten. */
static void fill(void *target, Put put, Delete delete, int first, int last) {
    static char value[1 << 12];
    char key[32];
    for (int n = first; n < last; n++) {
        size_t key_len = (size_t)sprintf(key, "key%05d", n), len = 0;
        for (int i = 0; i <= n % 50; i++) len += (size_t)sprintf(value + len, "value %d ", n);
        put(target, key, key_len, value, len);
        if (n % 7 == 3) delete(target, key, key_len);
        if (n % 11 == 5) put(target, key, key_len, "new", 3);
    }
}

static void special(void *target, Put put) {
    char all[256];
    for (int i = 0; i < 256; i++) all[i] = (char)i;
    put(target, "", 0, "empty key", 9);
    put(target, "\x00\xff", 2, all, sizeof all);
    put(target, "zz empty value", 14, "", 0);
}

static void long_key(void *target, Put put) {
    char *key = malloc(70000);
    memset(key, 'k', 70000);
    put(target, "a", 1, "1", 1);
    put(target, key, 70000, "long", 4);
    free(key);
}

/* LevelDB */

static void l_put(void *db, const char *key, size_t key_len, const char *value, size_t value_len) {
    char *error = NULL;
    leveldb_writeoptions_t *options = leveldb_writeoptions_create();
    leveldb_put(db, options, key, key_len, value, value_len, &error);
    leveldb_writeoptions_destroy(options);
    check(error);
}

static void l_delete(void *db, const char *key, size_t key_len) {
    char *error = NULL;
    leveldb_writeoptions_t *options = leveldb_writeoptions_create();
    leveldb_delete(db, options, key, key_len, &error);
    leveldb_writeoptions_destroy(options);
    check(error);
}

static leveldb_t *l_open(const char *name) {
    char *error = NULL;
    leveldb_options_t *options = leveldb_options_create();
    leveldb_options_set_create_if_missing(options, 1);
    leveldb_options_set_compression(options, leveldb_snappy_compression);
    leveldb_options_set_block_size(options, 1024);
    leveldb_t *db = leveldb_open(options, path_of(name), &error);
    check(error);
    leveldb_options_destroy(options);
    return db;
}

/* RocksDB */

struct family {
    rocksdb_t *db;
    rocksdb_column_family_handle_t *handle;
};

static void r_put(void *target, const char *key, size_t key_len, const char *value, size_t value_len) {
    struct family *family = target;
    char *error = NULL;
    rocksdb_writeoptions_t *options = rocksdb_writeoptions_create();
    rocksdb_put_cf(family->db, options, family->handle, key, key_len, value, value_len, &error);
    rocksdb_writeoptions_destroy(options);
    check(error);
}

static void r_delete(void *target, const char *key, size_t key_len) {
    struct family *family = target;
    char *error = NULL;
    rocksdb_writeoptions_t *options = rocksdb_writeoptions_create();
    rocksdb_delete_cf(family->db, options, family->handle, key, key_len, &error);
    rocksdb_writeoptions_destroy(options);
    check(error);
}

static void r_flush(struct family *family) {
    char *error = NULL;
    rocksdb_flushoptions_t *options = rocksdb_flushoptions_create();
    rocksdb_flushoptions_set_wait(options, 1);
    rocksdb_flush_cf(family->db, options, family->handle, &error);
    rocksdb_flushoptions_destroy(options);
    check(error);
}

/* Opens a database with the column families, and returns the number of them. */
static void r_open(const char *name, int count, const char *const *names, struct family *families) {
    char *error = NULL;
    rocksdb_options_t *options = rocksdb_options_create();
    rocksdb_options_set_create_if_missing(options, 1);
    rocksdb_options_set_create_missing_column_families(options, 1);
    rocksdb_options_set_compression(options, rocksdb_snappy_compression);
    const rocksdb_options_t *each[3];
    rocksdb_column_family_handle_t *handles[3];
    for (int i = 0; i < count; i++) {
        rocksdb_options_t *own = rocksdb_options_create_copy(options);
        if (strcmp(names[i], "pages") == 0) {
            rocksdb_options_set_enable_blob_files(own, 1);
            rocksdb_options_set_min_blob_size(own, 200);
        }
        each[i] = own;
    }
    rocksdb_t *db = rocksdb_open_column_families(options, path_of(name), count, names, each, handles, &error);
    check(error);
    for (int i = 0; i < count; i++) families[i] = (struct family){db, handles[i]};
}

static void r_close(int count, struct family *families) {
    for (int i = 0; i < count; i++) rocksdb_column_family_handle_destroy(families[i].handle);
    rocksdb_close(families[0].db);
}

int main(int argc, char **argv) {
    if (argc != 2) return 1;
    root = argv[1];
    mkdir(path_of("leveldb"), 0755);
    mkdir(path_of("rocksdb"), 0755);

    leveldb_t *l = l_open("leveldb/entries");
    fill(l, l_put, l_delete, 0, 150);
    leveldb_compact_range(l, NULL, 0, NULL, 0);
    fill(l, l_put, l_delete, 150, 280);
    leveldb_compact_range(l, "key00200", 8, NULL, 0);
    fill(l, l_put, l_delete, 280, 300);
    special(l, l_put);
    leveldb_close(l);
    leveldb_close(l_open("leveldb/empty"));
    l = l_open("leveldb/long_key");
    long_key(l, l_put);
    leveldb_compact_range(l, NULL, 0, NULL, 0);
    leveldb_close(l);

    const char *const names[] = {"default", "pages", "users"};
    struct family families[3];
    r_open("rocksdb/families", 3, names, families);
    fill(&families[0], r_put, r_delete, 0, 100);
    fill(&families[1], r_put, r_delete, 100, 200);
    fill(&families[2], r_put, r_delete, 200, 280);
    for (int i = 0; i < 3; i++) r_flush(&families[i]);
    fill(&families[2], r_put, r_delete, 280, 300);
    special(&families[0], r_put);
    r_close(3, families);
    r_open("rocksdb/empty", 1, names, families);
    r_close(1, families);
    r_open("rocksdb/long_key", 1, names, families);
    long_key(&families[0], r_put);
    r_flush(&families[0]);
    r_close(1, families);
    return 0;
}

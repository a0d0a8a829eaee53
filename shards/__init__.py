"""Datasets as webdataset shards with random access; this package knows nothing of dml.

- `build` (build): the program that packs a dataset into shards
- `index_tars` (index_tars): the program that indexes other people's tars where they are
- `verify` (verify): the program that checks shards
- `tars` (Tar, Member, read_tar, samples_of): reads them for it
- `sheet` (sheet): the program that draws a contact sheet
- `attribution` (attribution): the program that lists the authors and licences of icons
- `sources`: one module per dataset
- `item` (Item, Collection, ShardError, is_safe, escaped): what a source gives to the builder
- `photo` (Photo, open_photo): the one way to open an image
- `images` (check, load): checks images by decoding them
- `pack` (Packer, atomic_folder, write_index): writes tars, index and manifest
- `vector` (Form, is_vector, form_of, decoded, encoded): a vector of features as a .npy file
- `images` (check, load): checks images and vectors by decoding them
- `pack` (Packer, atomic_folder): writes tars, index and manifest
- `index` (Index, ImageReader, load_index, read_manifest, load_npy): reads them
- `checksums` (check_shards, differing, sha256_of): compares shards with their checksums
- `remote` (is_remote, content, read_range, open_range): reads files of servers
- `cache` (Cache, File): keeps files of servers, one copy per machine
- `fetcher` (Fetcher): a process that downloads them before they are needed
- `workers` (in_order, end_with_parent): a parallel map
- `files` (write_whole, write_synced, read_bounded, check_size, sync_file, sync_folder, remove, regular,
  no_follow, open_lock, is_locked, try_lock): atomic writes, bounded reads and locks
- `cores` (available_cores): counts cores
- `output` (run_program, exit_code, escape_unprintable, discard_output, Progress, time_left): how a
  program ends, prints and reports its progress
"""

//! The command line: every command, option and example that `azekura help` shows.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::encoding::TextEncoding;
use crate::partition_options::{PartitionOptionArgs, partition_name, time_to_live};
use crate::size::SIZE_HELP;

/// Directory of the database unless `--db` is given.
pub(crate) const DEFAULT_PATH: &str = ".azekura_data";

/// The text of `azekura help exit-codes`. `error` implements it.
pub(crate) const EXIT_CODES: &str = "\
Explain the exit codes.

    0  success
    1  the command ran, with a negative result: the key does not exist or has another value than is
       expected, `verify` found damage, a check of `demo` failed, an import or export skipped some
       entries, or a command in the input of `shell` failed
    2  the command line is wrong
    3  an error of the operating system or of the database
    4  the database is locked: another program has it open; on Linux the message names the process
    5  the database is damaged: bytes on disk are not what was written
  130  interrupted (Ctrl-C)

Commands that only read are not refused while another program writes. They read beside it, and say so on standard
error. At their end, scan, count, export, gc scan and verify also say how far the writer is ahead, if it is.

Errors are sentences on standard error. With --json each is one line there, and so is each notice:
    {\"error\": {\"kind\": \"locked\", \"message\": \"…\", \"file\": \"…\", \"offset\": null}}
    {\"notice\": {\"kind\": \"beside_writer\", \"sequence_number\": 1234}}
    {\"notice\": {\"kind\": \"behind_writer\", \"sequence_number\": 1234, \"behind\": 5}}";

/// Help text below the list of commands.
const START: &str = "Start here:
  azekura demo                                 store your own files, kill the writer, recover, check
  azekura put --db my.db --create hello world  write one entry to a new database
  azekura scan --db my.db                      list all entries
  azekura help put                             more about one command
  azekura help exit-codes                      what the exit codes mean";

/// Help text of `partitions create`.
const CREATE_EXAMPLES: &str = "Examples:
  azekura partitions create --db my.db users
  azekura partitions create --db my.db pages --kv-separation 1KiB --blob-file-size 256MiB
  azekura partitions create --db my.db logs --compression-per-level lz4,miniz:6 --block-size 16KiB
  azekura partitions create --db my.db counters --engine pmem --pool-max-size 64MiB
  azekura partitions create --db my.db visits --merge-operator u64-add";

/// Inspect, fill, verify and compact azekura databases.
///
/// A database is a directory. It has partitions, which are named maps from byte strings to byte strings, sorted by key.
/// Without --partition, commands use the partition "default". Commands that only read also run while another program
/// writes to the database: they read what was committed when they began, and name its last sequence number.
#[derive(Parser, Debug)]
#[command(
    name = "azekura",
    version,
    max_term_width = 100,
    after_help = START
)]
pub(crate) struct Cli {
    /// Print results and errors as JSON, and no progress bars.
    ///
    /// Commands that list entries print one object per line, all others a single object. Bytes that are not UTF-8 are
    /// in hexadecimal, under a name that ends in `_hex`; a list has one encoding for all keys and one for all values.
    #[arg(long, global = true)]
    pub(crate) json: bool,

    /// Directory of the database [default: that in the environment variable AZEKURA_DB, else .azekura_data; `demo`: a
    /// temporary directory].
    #[arg(long, global = true, value_name = "PATH")]
    pub(crate) db: Option<PathBuf>,

    /// The command.
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// All commands.
#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// Store real files, kill the writer process, recover, and check that no acknowledged write is lost.
    ///
    /// The demo stores every regular file below DIR as path → content in a new database, with large values in blob
    /// files. A process of its own writes; the demo kills it with SIGKILL, opens the database again, compares every
    /// acknowledged write, and stores the rest. Then it reads every file back byte for byte, scans all keys in order,
    /// changes entries under a snapshot, runs blob GC, and verifies every byte of the database. A small input is stored
    /// in several edited versions, so that memtables are flushed. Your files are only read.
    #[command(
        after_help = "Examples:\n  azekura demo\n  azekura demo ~/documents --db kept.db\n\nExits with 0 only if \
                            every check passed."
    )]
    Demo(DemoArgs),
    /// Write one entry; the partition must exist unless --create is given.
    #[command(
        after_help = "Examples:\n  azekura put --db my.db --create greeting \"hello world\"\n  azekura put --db my.db \
                            photo --file cat.jpg\n  date | azekura put --db my.db now -\n  azekura put --db my.db \
                            --hex 00ff cafe\n  azekura put --db my.db leader ann --if-absent"
    )]
    Put(PutArgs),
    /// Change the value of a key by the merge operator of its partition, which must exist.
    ///
    /// `partitions create --merge-operator` sets the operator. A counter adds a number of 8 little-endian bytes.
    #[command(
        after_help = "Examples:\n  azekura partitions create --db my.db notes --merge-operator append:,\n  azekura \
                            merge --db my.db --partition notes ada mathematician\n  azekura merge --db my.db \
                            --partition visits --hex 61 0100000000000000"
    )]
    Merge(EntryArgs),
    /// Print the value of a key; exits with 1 if the key does not exist.
    #[command(after_help = "Examples:\n  azekura get --db my.db greeting\n  azekura get --db my.db photo > cat.jpg")]
    Get(GetArgs),
    /// Remove keys, or a range of keys; a key that does not exist is no error.
    #[command(
        after_help = "Examples:\n  azekura del --db my.db greeting photo\n  azekura del --db my.db --prefix user:\n  \
                            azekura del --db my.db --from a --to b"
    )]
    Del(DelArgs),
    /// Remove all entries of a partition, and give the disk space back.
    ///
    /// Asks at a terminal. Elsewhere, --yes is needed.
    #[command(after_help = "Example:\n  azekura clear --db my.db --partition users --yes")]
    Clear(ClearArgs),
    /// List entries, sorted by key.
    ///
    /// Each line is a key, a tab and a value. Bytes that are not printable are shown as \xNN; on a terminal long values
    /// are shortened.
    #[command(
        after_help = "Examples:\n  azekura scan --db my.db --prefix user: --limit 10\n  azekura scan --db my.db \
                            --from a --to b --reverse --sizes\n  azekura scan --db my.db --json > entries.jsonl"
    )]
    Scan(ScanArgs),
    /// Count entries.
    #[command(after_help = "Example:\n  azekura count --db my.db --prefix user:")]
    Count(CountArgs),
    /// Store a directory (path → content), CSV, JSON lines, a native export or a database of another engine.
    ///
    /// CSV has a first row that names the columns: "key" and "value" for UTF-8 text, or "key_hex", "key_base64",
    /// "key_escape" and so on. A JSON line is {"key": "text", "value": "text"}, with the same names for other
    /// encodings. --key-encoding and --value-encoding say what a plain "key" or "value" holds. Symbolic links and
    /// empty directories are not stored.
    ///
    /// A file is read and checked to its end before the first entry is stored: a damaged, truncated or wrong file
    /// changes nothing. Entries are then stored in batches of up to 1,000; each batch is stored completely or not at
    /// all, and a failure leaves the batches before it. Standard input is stored batch by batch as it is read. Entries
    /// beyond the limits of the database are skipped and reported, and the exit code is 1; so is what an interrupted
    /// export to a directory has left. A full pool or a full disk ends the import, and the error says how much is
    /// stored. Only a native export has an end mark: CSV and JSON lines that were cut off between two entries look
    /// complete. Only a native export has expiry times. A partition that exists keeps its options.
    ///
    /// With --from, SOURCE is a database of another engine, which is only read, and which no other program may have
    /// open for writing. Its tables become partitions of the same name; the table without a name is "default". The
    /// whole source is read and checked first: if it is damaged, or has a key or a value beyond the limits, nothing is
    /// stored. A failure while entries are stored removes the partitions that the import created. Of an entity of
    /// RocksDB with several columns, only the default column is stored.
    #[command(after_help = "Examples:\n  azekura import --db my.db ~/documents\n  azekura import --db my.db \
                            entries.csv --key-encoding hex\n  azekura import --db my.db backup.azk --dry-run\n  zcat \
                            entries.jsonl.gz | azekura import --db my.db -\n  azekura import --db my.db --from redb \
                            old.redb --table users --partition people")]
    Import(ImportArgs),
    /// Write a partition out as a directory (key → path), CSV or JSON lines, or all partitions as a native file.
    ///
    /// A native file holds the partitions with their options, expiry times, checksums and an end mark; `import` creates
    /// the partitions with these options. CSV and JSON lines have one encoding for all keys and one for all values,
    /// which the name of the column or field states: "key" is UTF-8, the others are "key_hex", "key_base64" and
    /// "key_escape". Without --key-encoding and --value-encoding, all entries are read first to see whether they are
    /// UTF-8. As a directory, keys that are not safe relative paths (absolute, with "..", and so on) are skipped and
    /// reported, and the exit code is 1. The other formats can hold every key and value. CSV, JSON lines and
    /// directories have no expiry times.
    #[command(after_help = "Examples:\n  azekura export --db my.db backup.azk\n  azekura export --db my.db \
                            entries.csv --key-encoding base64\n  azekura export --db my.db copy-of-documents\n  \
                            azekura export --db my.db - | gzip > entries.jsonl.gz")]
    Export(ExportArgs),
    /// Show the counters of the database and its partitions, and its settings.
    ///
    /// Without --all, rows of zeros are left out, and settings that have their default. The settings are those with
    /// which the database was last opened to write. While another program writes, the counters are those of this
    /// command; the last line (in JSON "follower") says up to which sequence number it has read, and how many the
    /// writer had used since.
    #[command(after_help = "Examples:\n  azekura stats --db my.db\n  azekura stats --db my.db --all --json")]
    Stats(StatsArgs),
    /// Show the levels of each partition: tables, bytes, entries and tombstones, with a bar for the size.
    #[command(after_help = "Example:\n  azekura levels --db my.db")]
    Levels(PartitionFilter),
    /// Show the blob files: values, bytes that tables refer to, and how stale each is.
    ///
    /// Partitions with key-value separation store large values in blob files. A value that was overwritten or removed
    /// counts as referenced until a compaction drops its old version; `gc scan` is exact.
    #[command(after_help = "Examples:\n  azekura blobs --db my.db\n  azekura blobs --db my.db --partition pages")]
    Blobs(PartitionFilter),
    /// Find stale values in blob files, and reclaim their space.
    #[command(after_help = "Examples:\n  azekura gc scan --db my.db\n  azekura gc run --db my.db --space-amp 1.2\n  \
                            azekura gc run --db my.db --partition pages --staleness 0.7\n  azekura gc run --db my.db \
                            --drop-stale")]
    Gc(GcArgs),
    /// Read and check every byte of every file; exits with 1 and lists the damage.
    ///
    /// Lists the first 20 damaged files; --json lists all files. While another program writes, every byte of the tables
    /// and blob files is checked, and of the manifest, the log and pools what opening reads. A damaged end of the log
    /// is not noticed then.
    #[command(after_help = "Examples:\n  azekura verify --db my.db\n  azekura verify --db my.db --all-errors")]
    Verify(ErrorListArgs),
    /// Copy what is intact of a damaged database to a new one, and report the rest.
    ///
    /// The damaged database is only read. Every partition is read in key order around damaged blocks, and stored in the
    /// new database with its options and expiry times. The report has the number of recovered entries of each
    /// partition, the ranges of keys that are lost, and the damaged files. A partition that cannot be created, or whose
    /// pool is full, is reported, and the others are copied. A full disk ends the repair.
    ///
    /// A damaged block loses the keys of its range whose newest version may be in it, because an older version of a key
    /// must not replace a newer one that is lost; --older-versions recovers the older versions, which may also be of
    /// removed keys. If the header or the index of a table is damaged, that is the range of the table or of a part of
    /// it. A damaged value in a blob file loses one entry. A damaged log loses the damaged commits only; entries may
    /// then be of different times. A damaged pool loses the records before the last part of the log. If the manifest
    /// cannot be read, a new one is built from the properties of the tables, the pools and the log: then removed keys
    /// and older values may be there, and partitions may have default options; the report names files that were left
    /// out, or whose data may be stale. Exits with 1 if anything is lost or damaged.
    #[command(after_help = "Examples:\n  azekura repair my.db --out repaired.db\n  azekura repair --db my.db --out \
                            repaired.db --all-errors")]
    Repair(RepairArgs),
    /// Merge the tables of a partition into one sorted run, dropping deleted and overwritten entries.
    #[command(after_help = "Examples:\n  azekura compact --db my.db\n  azekura compact --db my.db --partition users")]
    Compact(PartitionFilter),
    /// Make a consistent copy of the database that can be opened at once; tables are hard-linked where possible.
    #[command(after_help = "Example:\n  azekura checkpoint --db my.db backup-of-monday")]
    Checkpoint(CheckpointArgs),
    /// Back up the database to a directory or an object store, and restore it, also to an earlier time.
    #[cfg(feature = "backup")]
    #[command(
        after_help = "Examples:\n  azekura backup create /mnt/backups/my.db --db my.db\n  azekura backup restore \
                            /mnt/backups/my.db restored.db"
    )]
    Backup(crate::backup_args::BackupArgs),
    /// Read and write one open database with commands at a prompt, or from standard input.
    ///
    /// At a terminal, lines can be edited, and Tab completes commands, options, partitions and keys. The history is
    /// kept in ~/.local/state/azekura/history, or in the file that AZEKURA_HISTORY names (empty: no file); a line that
    /// begins with a space is not kept. Without a terminal, standard input is a script: one command in each line, no
    /// prompt, and the first command that fails ends it with exit code 1. `help` in the shell lists its commands.
    ///
    /// While another program has the database open, the shell reads beside it, and each command sees what was committed
    /// before. A command that writes fails until that program has closed the database.
    #[command(after_help = "Examples:\n  azekura shell --db my.db\n  azekura shell --db my.db --read-only\n  \
                      printf 'put a 1\\nput b 2\\nscan\\n' | azekura shell --db my.db")]
    Shell(ShellArgs),
    /// List, create and drop partitions.
    #[command(
        after_help = "Examples:\n  azekura partitions --db my.db list\n  azekura partitions --db my.db create users\n  \
                            azekura partitions --db my.db create pages --kv-separation 1KiB\n  azekura partitions \
                            --db my.db drop users --yes"
    )]
    Partitions(PartitionsArgs),
    /// Write man pages or shell completions of this program.
    #[command(
        after_help = "Examples:\n  azekura generate man --dir /usr/local/share/man/man1\n  azekura generate man \
                            partitions create | man -l -\n  azekura generate completions bash > azekura.bash"
    )]
    Generate(GenerateArgs),
    /// Explain the exit codes.
    #[command(name = "exit-codes", long_about = EXIT_CODES)]
    ExitCodes,
    #[command(name = "demo-writer", hide = true)]
    DemoWriter(WriterArgs),
}

/// A partition.
#[derive(Args, Debug)]
pub(crate) struct PartitionArg {
    /// Name of the partition.
    #[arg(long = "partition", value_name = "NAME", default_value = "default", value_parser = partition_name)]
    pub(crate) name: String,
}

/// Encoding of keys and values on the command line.
#[derive(Args, Debug, Clone, Copy)]
pub(crate) struct HexArg {
    /// Keys and values on the command line and in the output are hexadecimal; files and standard input are not.
    #[arg(long)]
    pub(crate) hex: bool,
}

/// The entry of `put` and `merge`.
#[derive(Args, Debug)]
pub(crate) struct EntryArgs {
    #[command(flatten)]
    pub(crate) partition: PartitionArg,
    #[command(flatten)]
    pub(crate) hex: HexArg,
    /// The key.
    pub(crate) key: OsString,
    /// The value or operand; "-" reads it from standard input.
    #[arg(required_unless_present = "file")]
    pub(crate) value: Option<OsString>,
    /// Take the value from this file.
    #[arg(long, value_name = "FILE", conflicts_with = "value")]
    pub(crate) file: Option<PathBuf>,
}

/// Arguments of `put`.
#[derive(Args, Debug)]
pub(crate) struct PutArgs {
    #[command(flatten)]
    pub(crate) entry: EntryArgs,
    /// Create the database and the partition if they are missing.
    #[arg(long)]
    pub(crate) create: bool,
    #[command(flatten)]
    pub(crate) condition: ConditionArgs,
    /// The entry expires after this number of seconds.
    #[arg(long, value_name = "SECONDS", value_parser = time_to_live)]
    pub(crate) ttl: Option<Duration>,
}

/// What a write requires of the value of its key. It is checked in the commit; exits with 1 if another value is found.
#[derive(Args, Debug)]
pub(crate) struct ConditionArgs {
    /// Write only if the key does not exist.
    #[arg(long)]
    pub(crate) if_absent: bool,
    /// Write only if the key has this value. Not with --create: a new partition has no key.
    #[arg(long, value_name = "VALUE", conflicts_with_all = ["if_absent", "create"])]
    pub(crate) if_value: Option<OsString>,
}

/// Arguments of `get`.
#[derive(Args, Debug)]
pub(crate) struct GetArgs {
    #[command(flatten)]
    pub(crate) partition: PartitionArg,
    #[command(flatten)]
    pub(crate) hex: HexArg,
    /// The key.
    pub(crate) key: OsString,
}

/// Arguments of `del`.
#[derive(Args, Debug)]
pub(crate) struct DelArgs {
    #[command(flatten)]
    pub(crate) partition: PartitionArg,
    #[command(flatten)]
    pub(crate) hex: HexArg,
    #[command(flatten)]
    pub(crate) range: RangeArgs,
    /// The keys; one commit removes all of them.
    #[arg(
        required_unless_present_any = ["prefix", "from", "to"],
        conflicts_with_all = ["prefix", "from", "to"],
        value_name = "KEY"
    )]
    pub(crate) keys: Vec<OsString>,
    /// Remove only if all of the keys have this value.
    #[arg(long, value_name = "VALUE", conflicts_with_all = ["prefix", "from", "to"])]
    pub(crate) if_value: Option<OsString>,
}

/// A range of keys.
#[derive(Args, Debug)]
pub(crate) struct RangeArgs {
    /// Only keys that begin with this.
    #[arg(long, value_name = "KEY", conflicts_with_all = ["from", "to"])]
    pub(crate) prefix: Option<OsString>,
    /// Only keys greater than or equal to this one.
    #[arg(long, value_name = "KEY")]
    pub(crate) from: Option<OsString>,
    /// Only keys less than this one.
    #[arg(long, value_name = "KEY")]
    pub(crate) to: Option<OsString>,
}

/// Arguments of `scan`.
#[derive(Args, Debug)]
pub(crate) struct ScanArgs {
    #[command(flatten)]
    pub(crate) partition: PartitionArg,
    #[command(flatten)]
    pub(crate) hex: HexArg,
    #[command(flatten)]
    pub(crate) range: RangeArgs,
    /// From the last key to the first.
    #[arg(long)]
    pub(crate) reverse: bool,
    /// Stop after this many entries.
    #[arg(long, value_name = "N")]
    pub(crate) limit: Option<u64>,
    /// Print only the keys.
    #[arg(long)]
    pub(crate) keys_only: bool,
    /// Print the size of each value in bytes instead of the value.
    #[arg(long, conflicts_with = "keys_only")]
    pub(crate) sizes: bool,
    /// Encoding of all keys with --json; output then begins at once [default: utf8 if all are UTF-8, else hex; the
    /// entries are read once more to find out].
    #[arg(long, value_enum, value_name = "ENCODING", conflicts_with = "hex")]
    pub(crate) key_encoding: Option<TextEncoding>,
    /// Encoding of all values with --json [default: as for keys].
    #[arg(long, value_enum, value_name = "ENCODING", conflicts_with = "hex")]
    pub(crate) value_encoding: Option<TextEncoding>,
}

/// Arguments of `count`.
#[derive(Args, Debug)]
pub(crate) struct CountArgs {
    #[command(flatten)]
    pub(crate) partition: PartitionArg,
    #[command(flatten)]
    pub(crate) hex: HexArg,
    #[command(flatten)]
    pub(crate) range: RangeArgs,
}

/// Format of entries outside the database.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TransferFormat {
    /// A file of azekura: partitions with their options, with checksums and an end mark.
    Native,
    /// CSV with the columns key and value.
    Csv,
    /// JSON lines: one {"key": …, "value": …} per line.
    Jsonl,
    /// A directory: paths are keys, contents are values.
    Dir,
}

/// Length of lists of errors.
#[derive(Args, Debug, Clone, Copy)]
pub(crate) struct ErrorListArgs {
    /// List all errors instead of the first 20.
    #[arg(long)]
    pub(crate) all_errors: bool,
}

/// Arguments of `repair`.
#[derive(Args, Debug)]
pub(crate) struct RepairArgs {
    /// Directory of the damaged database [default: that of --db].
    pub(crate) path: Option<PathBuf>,
    /// Directory of the new database; it must not exist, or be empty.
    #[arg(long, value_name = "NEWPATH")]
    pub(crate) out: PathBuf,
    /// Recover older versions of keys whose newest version is damaged; the report names these keys.
    #[arg(long)]
    pub(crate) older_versions: bool,
    #[command(flatten)]
    pub(crate) errors: ErrorListArgs,
}

/// Encodings of keys and values in CSV and JSON lines.
#[derive(Args, Debug, Clone, Copy)]
pub(crate) struct EncodingArgs {
    /// Encoding of the keys in CSV and JSON lines; `import` needs it only for a plain "key" column that is not UTF-8
    /// [default: for export, utf8 if all are UTF-8, else hex].
    #[arg(long, value_enum, value_name = "ENCODING")]
    pub(crate) key_encoding: Option<TextEncoding>,
    /// Encoding of the values in CSV and JSON lines [default: as for keys].
    #[arg(long, value_enum, value_name = "ENCODING")]
    pub(crate) value_encoding: Option<TextEncoding>,
}

/// Columns of CSV.
#[derive(Args, Debug, Clone, Default, PartialEq)]
pub(crate) struct CsvArgs {
    /// Name of the column with the keys, with or without the suffix of its encoding [default: key]. `import` ignores
    /// other columns if this option or the next is given.
    #[arg(long, value_name = "NAME")]
    pub(crate) key_column: Option<String>,
    /// Name of the column with the values, likewise [default: value].
    #[arg(long, value_name = "NAME")]
    pub(crate) value_column: Option<String>,
    /// The character between two columns, "\t" for a tabulator [default: ","].
    #[arg(long, value_name = "CHARACTER", value_parser = delimiter)]
    pub(crate) delimiter: Option<u8>,
}

fn delimiter(text: &str) -> Result<u8, String> {
    match text.as_bytes() {
        b"\\t" => Ok(b'\t'),
        [byte] if byte.is_ascii() && !b"\"\r\n".contains(byte) => Ok(*byte),
        _ => Err("expected one ASCII character that is neither a quotation mark nor the end of a line".into()),
    }
}

/// Engines whose databases `import --from` reads.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PeerEngine {
    /// Column families become partitions.
    Rocksdb,
    /// One partition.
    Leveldb,
    /// Tables become partitions; keys and values are byte strings, text, integers, bool or char.
    Redb,
    /// Trees become partitions.
    Sled,
    /// Named databases become partitions.
    Lmdb,
    /// Keyspaces become partitions; Fjall 3.
    Fjall,
}

impl PeerEngine {
    /// The name on the command line.
    pub(crate) fn name(self) -> String {
        self.to_possible_value().expect("no engine is hidden").get_name().to_string()
    }
}

/// Arguments of `import`.
#[derive(Args, Debug)]
pub(crate) struct ImportArgs {
    /// Name of the partition [default: `default`; for `native` the names in the file].
    ///
    /// With a native file of one partition, this is the name of the new partition. With a native file of several, only
    /// the partition of this name is stored. With --from, this is the name of the new partition, and --table chooses
    /// the table unless there is only one.
    #[arg(long, value_name = "NAME")]
    pub(crate) partition: Option<String>,
    /// A directory or a file; "-" reads standard input.
    pub(crate) source: PathBuf,
    /// Format of SOURCE [default: `dir` for a directory, `native` for a file that begins as one, `csv` for names that
    /// end in .csv, else `jsonl`].
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub(crate) format: Option<TransferFormat>,
    /// Import a database of another engine; SOURCE is its directory or file.
    ///
    /// Needs a program that was built with the feature of the importer, for example `import-redb`, or `import-all`.
    #[arg(long, value_enum, value_name = "ENGINE",
        conflicts_with_all = ["format", "key_encoding", "value_encoding", "key_column", "value_column", "delimiter",
            "ignore_options"])]
    pub(crate) from: Option<PeerEngine>,
    /// Only this table of the other engine, in the word of that engine a tree, for example; can be repeated.
    #[arg(long, value_name = "NAME", requires = "from")]
    pub(crate) table: Vec<String>,
    /// Import a database of sled or Fjall also if the engine ignores a part of its log, which may be damaged.
    #[arg(long, requires = "from")]
    pub(crate) allow_torn_log: bool,
    /// Read the database of the other engine in this process, also if its library may crash.
    #[arg(long, hide = true, requires = "from")]
    pub(crate) in_process: bool,
    #[command(flatten)]
    pub(crate) encodings: EncodingArgs,
    #[command(flatten)]
    pub(crate) csv: CsvArgs,
    /// Only check SOURCE, and report what would be stored; opens no database.
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Create partitions with default options instead of those in a native file.
    #[arg(long)]
    pub(crate) ignore_options: bool,
    #[command(flatten)]
    pub(crate) errors: ErrorListArgs,
}

/// Arguments of `export`.
#[derive(Args, Debug)]
pub(crate) struct ExportArgs {
    /// Name of the partition [default: `default`; for `native` all partitions].
    #[arg(long, value_name = "NAME")]
    pub(crate) partition: Option<String>,
    /// A new or empty directory, or a new file; "-" writes to standard output.
    pub(crate) target: PathBuf,
    /// Format of TARGET [default: `jsonl` for "-" and names that end in .jsonl, .ndjson or .json, `csv` for .csv,
    /// `native` for .azk, else `dir`].
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub(crate) format: Option<TransferFormat>,
    #[command(flatten)]
    pub(crate) encodings: EncodingArgs,
    #[command(flatten)]
    pub(crate) csv: CsvArgs,
    #[command(flatten)]
    pub(crate) errors: ErrorListArgs,
}

/// One or all partitions of the database.
#[derive(Args, Debug)]
pub(crate) struct PartitionFilter {
    /// Only this partition [default: all].
    #[arg(long, value_name = "NAME")]
    pub(crate) partition: Option<String>,
}

/// Arguments of `stats`.
#[derive(Args, Debug)]
pub(crate) struct StatsArgs {
    #[command(flatten)]
    pub(crate) filter: PartitionFilter,
    /// Also show rows of zeros and default settings; JSON always has them.
    #[arg(long)]
    pub(crate) all: bool,
}

/// Arguments of `gc`.
#[derive(Args, Debug)]
pub(crate) struct GcArgs {
    /// The subcommand.
    #[command(subcommand)]
    pub(crate) action: GcAction,
}

/// Subcommands of `gc`.
#[derive(Subcommand, Debug)]
pub(crate) enum GcAction {
    /// Report exactly how stale the blob files are; reads keys and pointers, no values, and writes nothing.
    #[command(after_help = "Example:\n  azekura gc scan --db my.db --partition pages")]
    Scan {
        #[command(flatten)]
        partitions: GcPartitionArgs,
    },
    /// Copy live values out of stale blob files until a goal is reached, and remove the files.
    #[command(after_help = "Examples:\n  azekura gc run --db my.db --space-amp 1.2\n  azekura gc run --db my.db \
                            --staleness 0.7")]
    Run {
        #[command(flatten)]
        partitions: GcPartitionArgs,
        #[command(flatten)]
        goal: GcGoalArgs,
    },
}

/// Some or all of the partitions with key-value separation.
#[derive(Args, Debug)]
pub(crate) struct GcPartitionArgs {
    /// Only this partition; may be given several times [default: all with key-value separation].
    #[arg(long = "partition", value_name = "NAME")]
    pub(crate) partitions: Vec<String>,
}

/// The goal of `gc run`; default `--space-amp 1.5`.
#[derive(Args, Debug)]
#[group(multiple = false)]
pub(crate) struct GcGoalArgs {
    /// Until blob files have at most this many bytes for each live byte, at least 1 [default: 1.5].
    #[arg(long, value_name = "TARGET", value_parser = space_amp)]
    pub(crate) space_amp: Option<f32>,
    /// Until no file has this share of stale bytes or more, 0 to 1.
    #[arg(long, value_name = "SHARE", value_parser = staleness)]
    pub(crate) staleness: Option<f32>,
    /// Remove only files that have no live value; copies nothing.
    #[arg(long)]
    pub(crate) drop_stale: bool,
}

fn space_amp(text: &str) -> Result<f32, String> {
    text.parse().ok().filter(|target| *target >= 1.0).ok_or_else(|| "expected a number of at least 1".into())
}

fn staleness(text: &str) -> Result<f32, String> {
    text.parse().ok().filter(|share| (0.0..=1.0).contains(share)).ok_or_else(|| "expected a number from 0 to 1".into())
}

/// Arguments of `checkpoint`.
#[derive(Args, Debug)]
pub(crate) struct CheckpointArgs {
    /// The directory to create; it must not exist.
    pub(crate) target: PathBuf,
}

/// Arguments of `shell`.
#[derive(Args, Debug)]
pub(crate) struct ShellArgs {
    #[command(flatten)]
    pub(crate) partition: PartitionArg,
    /// Open the database to read only, beside other readers and beside a program that writes.
    #[arg(long)]
    pub(crate) read_only: bool,
}

/// Arguments of `partitions`.
#[derive(Args, Debug)]
pub(crate) struct PartitionsArgs {
    /// The subcommand.
    #[command(subcommand)]
    pub(crate) action: PartitionsAction,
}

/// Subcommands of `partitions`.
#[derive(Subcommand, Debug)]
pub(crate) enum PartitionsAction {
    /// List the names.
    List,
    /// Create an empty partition, and the database if it is missing; exits with 0 if the partition exists.
    ///
    /// A partition that exists is not changed, also if options are given.
    #[command(after_help = format!("{CREATE_EXAMPLES}\n\n{SIZE_HELP}."))]
    Create {
        /// The name: any text of 1 to 255 bytes.
        #[arg(value_parser = partition_name)]
        name: String,
        #[command(flatten)]
        options: Box<PartitionOptionArgs>,
    },
    /// Delete a partition and all its entries; exits with 1 if it does not exist.
    ///
    /// Asks at a terminal. Elsewhere, --yes is needed.
    #[command(after_help = "Example:\n  azekura partitions drop --db my.db users --yes")]
    Drop {
        /// The name.
        name: String,
        #[command(flatten)]
        confirmation: ConfirmationArg,
    },
}

/// Whether to ask before something is deleted.
#[derive(Args, Debug, Clone, Copy)]
pub(crate) struct ConfirmationArg {
    /// Delete without asking.
    #[arg(long)]
    pub(crate) yes: bool,
}

/// Arguments of `clear`.
#[derive(Args, Debug)]
pub(crate) struct ClearArgs {
    #[command(flatten)]
    pub(crate) partition: PartitionArg,
    #[command(flatten)]
    pub(crate) confirmation: ConfirmationArg,
}

/// Arguments of `generate`.
#[derive(Args, Debug)]
pub(crate) struct GenerateArgs {
    /// What to write.
    #[arg(value_enum)]
    pub(crate) kind: GenerateKind,
    /// The shell, or the words of a command (default: the page of `azekura`); written to standard output.
    #[arg(conflicts_with = "dir")]
    pub(crate) of: Vec<String>,
    /// Write the files of all shells or commands to this directory, which is created if it is missing.
    #[arg(long, value_name = "DIR")]
    pub(crate) dir: Option<PathBuf>,
}

/// Files that `generate` writes.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GenerateKind {
    /// One manual page for each command, in section 1.
    Man,
    /// Completions for bash, elvish, fish, PowerShell and zsh.
    Completions,
}

/// Arguments of `demo`.
#[derive(Args, Debug)]
pub(crate) struct DemoArgs {
    /// The directory whose files are stored [default: the current one, without `target` and `.git`].
    pub(crate) dir: Option<PathBuf>,
    /// About how long the demo may take; it skips files that do not fit, and reports that.
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u64).range(5..=3600))]
    pub(crate) seconds: u64,
    /// Size in bytes at which a memtable is flushed.
    #[arg(long, hide = true, value_name = "BYTES", default_value_t = 16 << 20)]
    pub(crate) memtable_bytes: u64,
}

/// Arguments of the hidden writer process of `demo`.
#[derive(Args, Debug)]
pub(crate) struct WriterArgs {
    /// File with the keys, as `InputFiles` writes it.
    #[arg(long)]
    pub(crate) list: PathBuf,
    #[arg(long)]
    pub(crate) root: PathBuf,
    /// Number of versions of each file.
    #[arg(long)]
    pub(crate) versions: u64,
    #[arg(long)]
    pub(crate) memtable_bytes: u64,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn clap_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_has_summary_and_example() {
        for command in Cli::command().get_subcommands().filter(|c| !c.is_hide_set()) {
            let name = command.get_name();
            assert!(command.get_about().is_some(), "{name} has no summary");
            let example = command.get_after_help().is_some_and(|help| help.to_string().contains("azekura "));
            assert!(example || name == "exit-codes", "{name} has no example");
        }
    }
}

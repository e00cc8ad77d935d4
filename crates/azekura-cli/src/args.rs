//! The command line: every command, option and example that `azekura help` shows.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::demo::{DemoArgs, WriterArgs};
use crate::failure::EXIT_CODES;

/// Below the list of commands.
const START: &str = "Start here:
  azekura demo                        the whole path on your own files, a crash included
  azekura put --db my.db hello world  write one entry
  azekura scan --db my.db             list all entries
  azekura help put                    more about one command
  azekura help exit-codes             what the exit codes mean";

/// Look into, fill, check and compact azekura databases.
///
/// A database is a directory. It holds partitions, which are named maps from byte strings to byte strings, in the order
/// of their keys. Without --partition, commands work on the partition "default".
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
    /// Commands that list entries print one object a line, all others a single object. Bytes that are not UTF-8 stand
    /// in hexadecimal under a name that ends in `_hex`.
    #[arg(long, global = true)]
    pub(crate) json: bool,

    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What can be done.
#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// Store real files, kill the writer half-way, recover, and check that nothing was lost.
    ///
    /// Every regular file below DIR is stored as path → content in a fresh database. The writer is a process of its
    /// own; it is killed with SIGKILL half-way, the database is opened again, everything that was acknowledged must be
    /// there, and a new writer goes on. Then every file is read back byte for byte, a scan must give the paths in
    /// order, and a snapshot must still see the old state after changes. Small inputs are filled up with generated
    /// versions of the files until the tree has two levels. Your files are only read.
    #[command(
        after_help = "Examples:\n  azekura demo\n  azekura demo ~/documents --db kept.db\n\nExits with 0 only if \
                            everything held."
    )]
    Demo(DemoArgs),
    /// Write one entry; creates the database and the partition if they are missing.
    #[command(
        after_help = "Examples:\n  azekura put --db my.db greeting \"hello world\"\n  azekura put --db my.db photo \
                            --file cat.jpg\n  date | azekura put --db my.db now -\n  azekura put --db my.db --hex 00ff \
                            cafe"
    )]
    Put(PutArgs),
    /// Print the value of a key; exits with 1 if there is none.
    #[command(after_help = "Examples:\n  azekura get --db my.db greeting\n  azekura get --db my.db photo > cat.jpg")]
    Get(GetArgs),
    /// Remove keys; a key that does not exist is no error.
    #[command(after_help = "Example:\n  azekura del --db my.db greeting photo")]
    Del(DelArgs),
    /// List entries in the order of their keys.
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
    /// Store a directory (path → content) or a file of JSON lines.
    ///
    /// A JSON line is {"key": "text", "value": "text"}; bytes that are not UTF-8 go into "key_hex" and "value_hex".
    /// Symbolic links and empty directories are not stored.
    #[command(after_help = "Examples:\n  azekura import --db my.db ~/documents\n  azekura import --db my.db \
                            entries.jsonl\n  zcat entries.jsonl.gz | azekura import --db my.db -")]
    Import(ImportArgs),
    /// Write a partition out as a directory (key → path) or as JSON lines.
    ///
    /// Keys that are no safe relative paths (absolute, with "..", and so on) are not written into a directory; they are
    /// listed, and the exit code is 1. JSON lines can hold every key and value.
    #[command(after_help = "Examples:\n  azekura export --db my.db copy-of-documents\n  azekura export --db my.db \
                            entries.jsonl\n  azekura export --db my.db - | gzip > entries.jsonl.gz")]
    Export(ExportArgs),
    /// Show every counter of the database and its partitions.
    #[command(after_help = "Example:\n  azekura stats --db my.db --json")]
    Stats(LookArgs),
    /// Draw the shape of the trees: tables, bytes, entries and tombstones of each level.
    #[command(after_help = "Example:\n  azekura levels --db my.db")]
    Levels(LookArgs),
    /// Show the blob files: values, bytes that tables refer to, and how stale each is.
    ///
    /// Large values of partitions with key-value separation stand in blob files. A value that was overwritten or
    /// removed counts as referenced until a compaction has met it; `gc scan` is exact.
    #[command(after_help = "Examples:\n  azekura blobs --db my.db\n  azekura blobs --db my.db --partition pages")]
    Blobs(LookArgs),
    /// Find stale values in blob files, and collect them.
    #[command(after_help = "Examples:\n  azekura gc scan --db my.db\n  azekura gc run --db my.db --space-amp 1.2\n  \
                            azekura gc run --db my.db --partition pages --staleness 0.7\n  azekura gc run --db my.db \
                            --drop-stale")]
    Gc(GcArgs),
    /// Read and check every byte of every file; exits with 1 and lists what is wrong.
    #[command(after_help = "Example:\n  azekura verify --db my.db")]
    Verify(DbArg),
    /// Merge the tables of a partition into one sorted run, dropping what is deleted or overwritten.
    #[command(after_help = "Examples:\n  azekura compact --db my.db\n  azekura compact --db my.db --partition users")]
    Compact(CompactArgs),
    /// Make a consistent copy of the whole database, ready to be opened; tables are hard-linked where possible.
    #[command(after_help = "Example:\n  azekura checkpoint --db my.db backup-of-monday")]
    Checkpoint(CheckpointArgs),
    /// List, create and drop partitions.
    #[command(
        after_help = "Examples:\n  azekura partitions --db my.db list\n  azekura partitions --db my.db create users\n  \
                            azekura partitions --db my.db drop users"
    )]
    Partitions(PartitionsArgs),
    /// Explain the exit codes.
    #[command(name = "exit-codes", long_about = EXIT_CODES)]
    ExitCodes,
    #[command(name = "demo-writer", hide = true)]
    DemoWriter(WriterArgs),
}

/// Where the database is.
#[derive(Args, Debug)]
pub(crate) struct DbArg {
    /// Directory of the database.
    #[arg(long = "db", value_name = "PATH", default_value = ".azekura_data")]
    pub(crate) path: PathBuf,
}

/// Which map of which database.
#[derive(Args, Debug)]
pub(crate) struct MapArgs {
    #[command(flatten)]
    pub(crate) db: DbArg,
    /// Name of the partition.
    #[arg(long, value_name = "NAME", default_value = "default")]
    pub(crate) partition: String,
}

/// How keys and values are written on the command line.
#[derive(Args, Debug, Clone, Copy)]
pub(crate) struct HexArg {
    /// Keys and values on the command line and in the output are hexadecimal; files and standard input are not.
    #[arg(long)]
    pub(crate) hex: bool,
}

/// Arguments of `put`.
#[derive(Args, Debug)]
pub(crate) struct PutArgs {
    #[command(flatten)]
    pub(crate) map: MapArgs,
    #[command(flatten)]
    pub(crate) hex: HexArg,
    /// The key.
    pub(crate) key: OsString,
    /// The value; "-" reads it from standard input.
    #[arg(required_unless_present = "file")]
    pub(crate) value: Option<OsString>,
    /// Take the value from this file.
    #[arg(long, value_name = "FILE", conflicts_with = "value")]
    pub(crate) file: Option<PathBuf>,
}

/// Arguments of `get`.
#[derive(Args, Debug)]
pub(crate) struct GetArgs {
    #[command(flatten)]
    pub(crate) map: MapArgs,
    #[command(flatten)]
    pub(crate) hex: HexArg,
    /// The key.
    pub(crate) key: OsString,
}

/// Arguments of `del`.
#[derive(Args, Debug)]
pub(crate) struct DelArgs {
    #[command(flatten)]
    pub(crate) map: MapArgs,
    #[command(flatten)]
    pub(crate) hex: HexArg,
    /// The keys; they are removed together or not at all.
    #[arg(required = true, value_name = "KEY")]
    pub(crate) keys: Vec<OsString>,
}

/// Which keys.
#[derive(Args, Debug)]
pub(crate) struct RangeArgs {
    /// Only keys that begin with this.
    #[arg(long, value_name = "KEY", conflicts_with_all = ["from", "to"])]
    pub(crate) prefix: Option<OsString>,
    /// Only this key and those behind it.
    #[arg(long, value_name = "KEY")]
    pub(crate) from: Option<OsString>,
    /// Only keys before this one.
    #[arg(long, value_name = "KEY")]
    pub(crate) to: Option<OsString>,
}

/// Arguments of `scan`.
#[derive(Args, Debug)]
pub(crate) struct ScanArgs {
    #[command(flatten)]
    pub(crate) map: MapArgs,
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
    /// Print the keys alone.
    #[arg(long)]
    pub(crate) keys_only: bool,
    /// Print the size of each value in bytes in its place.
    #[arg(long, conflicts_with = "keys_only")]
    pub(crate) sizes: bool,
}

/// Arguments of `count`.
#[derive(Args, Debug)]
pub(crate) struct CountArgs {
    #[command(flatten)]
    pub(crate) map: MapArgs,
    #[command(flatten)]
    pub(crate) hex: HexArg,
    #[command(flatten)]
    pub(crate) range: RangeArgs,
}

/// How entries stand outside the database.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// A directory: paths are keys, contents are values.
    Dir,
    /// JSON lines: one {"key": …, "value": …} a line.
    Jsonl,
}

/// Arguments of `import`.
#[derive(Args, Debug)]
pub(crate) struct ImportArgs {
    #[command(flatten)]
    pub(crate) map: MapArgs,
    /// A directory, or a file of JSON lines; "-" reads JSON lines from standard input.
    pub(crate) source: PathBuf,
    /// What SOURCE is [default: a directory is `dir`, anything else is `jsonl`].
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub(crate) format: Option<Format>,
}

/// Arguments of `export`.
#[derive(Args, Debug)]
pub(crate) struct ExportArgs {
    #[command(flatten)]
    pub(crate) map: MapArgs,
    /// A new or empty directory, or a new file; "-" writes JSON lines to standard output.
    pub(crate) target: PathBuf,
    /// What to write [default: `jsonl` for "-" and names that end in .jsonl, .ndjson or .json, else `dir`].
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub(crate) format: Option<Format>,
}

/// Arguments of `stats`, `levels` and `blobs`.
#[derive(Args, Debug)]
pub(crate) struct LookArgs {
    #[command(flatten)]
    pub(crate) db: DbArg,
    /// Only this partition [default: all].
    #[arg(long, value_name = "NAME")]
    pub(crate) partition: Option<String>,
}

/// Arguments of `gc`.
#[derive(Args, Debug)]
pub(crate) struct GcArgs {
    /// What to do with stale values.
    #[command(subcommand)]
    pub(crate) action: GcAction,
}

/// What can be done with stale values.
#[derive(Subcommand, Debug)]
pub(crate) enum GcAction {
    /// Say exactly how stale the blob files are; keys and pointers are read, no values, and nothing is written.
    #[command(after_help = "Example:\n  azekura gc scan --db my.db --partition pages")]
    Scan {
        #[command(flatten)]
        which: SeparatedArgs,
    },
    /// Copy live values out of stale blob files, as few as it takes, and remove the files.
    #[command(after_help = "Examples:\n  azekura gc run --db my.db --space-amp 1.2\n  azekura gc run --db my.db \
                            --staleness 0.7")]
    Run {
        #[command(flatten)]
        which: SeparatedArgs,
        #[command(flatten)]
        goal: GoalArgs,
    },
}

/// Which partitions with key-value separation.
#[derive(Args, Debug)]
pub(crate) struct SeparatedArgs {
    #[command(flatten)]
    pub(crate) db: DbArg,
    /// Only this partition; may be given several times [default: all with key-value separation].
    #[arg(long = "partition", value_name = "NAME")]
    pub(crate) partitions: Vec<String>,
}

/// How far to go; `--space-amp 1.5` if nothing is said.
#[derive(Args, Debug)]
#[group(multiple = false)]
pub(crate) struct GoalArgs {
    /// Until blob files have at most this many bytes for each live one, at least 1 [default: 1.5].
    #[arg(long, value_name = "TARGET", value_parser = space_amp)]
    pub(crate) space_amp: Option<f32>,
    /// Until no file is left of which this share or more is stale, 0 to 1.
    #[arg(long, value_name = "SHARE", value_parser = staleness)]
    pub(crate) staleness: Option<f32>,
    /// Remove only files that are stale as a whole: nothing is copied.
    #[arg(long)]
    pub(crate) drop_stale: bool,
}

fn space_amp(text: &str) -> Result<f32, String> {
    text.parse().ok().filter(|target| *target >= 1.0).ok_or_else(|| "it is a number of at least 1".into())
}

fn staleness(text: &str) -> Result<f32, String> {
    text.parse().ok().filter(|share| (0.0..=1.0).contains(share)).ok_or_else(|| "it is a number from 0 to 1".into())
}

/// Arguments of `compact`.
#[derive(Args, Debug)]
pub(crate) struct CompactArgs {
    #[command(flatten)]
    pub(crate) db: DbArg,
    /// Only this partition [default: all].
    #[arg(long, value_name = "NAME")]
    pub(crate) partition: Option<String>,
}

/// Arguments of `checkpoint`.
#[derive(Args, Debug)]
pub(crate) struct CheckpointArgs {
    #[command(flatten)]
    pub(crate) db: DbArg,
    /// The directory to create; it must not exist.
    pub(crate) target: PathBuf,
}

/// Arguments of `partitions`.
#[derive(Args, Debug)]
pub(crate) struct PartitionsArgs {
    #[command(flatten)]
    pub(crate) db: DbArg,
    /// What to do with partitions.
    #[command(subcommand)]
    pub(crate) action: PartitionsAction,
}

/// What can be done with partitions.
#[derive(Subcommand, Debug)]
pub(crate) enum PartitionsAction {
    /// List the names.
    List,
    /// Create an empty partition, and the database if it is missing; fine if it exists.
    Create {
        /// The name: any text of 1 to 255 bytes.
        name: String,
    },
    /// Delete a partition and everything in it; exits with 1 if there is none of that name.
    Drop {
        /// The name.
        name: String,
    },
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_has_a_sentence_and_an_example() {
        for command in Cli::command().get_subcommands().filter(|c| !c.is_hide_set()) {
            let name = command.get_name();
            assert!(command.get_about().is_some(), "{name} has no sentence");
            let example = command.get_after_help().is_some_and(|help| help.to_string().contains("azekura "));
            assert!(example || name == "exit-codes", "{name} has no example");
        }
    }
}

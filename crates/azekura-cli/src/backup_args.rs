//! The arguments of `backup`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};

use crate::size::{SIZE_HELP, size_in};

/// Arguments of `backup`.
#[derive(Args, Debug)]
pub(crate) struct BackupArgs {
    /// The subcommand.
    #[command(subcommand)]
    pub(crate) action: BackupAction,
}

/// The place of the backups.
#[derive(Args, Debug)]
pub(crate) struct StoreArgs {
    /// Directory, or URL such as file:///path or s3://bucket/path, that holds the backups of one database.
    ///
    /// Credentials and other options of a cloud store are read from variables of the environment that begin with AWS_,
    /// AZURE_ or GOOGLE_, such as AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT.
    pub(crate) store: String,
    /// Bytes per second to transfer at most.
    #[arg(long, value_name = "SIZE", value_parser = size_in::<u64>(1..=u64::MAX), long_help = format!(
        "Bytes per second to transfer at most.\n\n{SIZE_HELP}"))]
    pub(crate) rate_limit: Option<u64>,
}

/// Subcommands of `backup`.
#[derive(Subcommand, Debug)]
pub(crate) enum BackupAction {
    /// Back up the database; only what no earlier backup has is uploaded.
    ///
    /// After a failure, the next call goes on from what is stored.
    #[command(
        after_help = "Examples:\n  azekura backup create --db my.db /mnt/backups/my.db\n  azekura backup create --db \
                            my.db s3://bucket/my.db --rate-limit 20MiB"
    )]
    Create(BackupCreateArgs),
    /// List the backups, oldest first.
    #[command(after_help = "Example:\n  azekura backup list /mnt/backups/my.db")]
    List(StoreArgs),
    /// Download and check everything that is stored; exits with 1 and lists the damage.
    #[command(after_help = "Examples:\n  azekura backup verify /mnt/backups/my.db\n  azekura backup verify --quick \
                            s3://bucket/my.db")]
    Verify(BackupVerifyArgs),
    /// Restore the newest backup and the shipped log, or the state of an earlier time, to a new directory.
    #[command(
        after_help = "Examples:\n  azekura backup restore /mnt/backups/my.db restored.db\n  azekura backup restore \
                            s3://bucket/my.db restored.db --until 2026-11-28T10:15:00Z"
    )]
    Restore(BackupRestoreArgs),
    /// Remove all but the newest backups, and what only they needed.
    ///
    /// Their objects are deleted by the first call that is made a day later or more, so that no backup that is made at
    /// the same time loses what it shares with them.
    #[command(after_help = "Example:\n  azekura backup prune --keep 7 /mnt/backups/my.db")]
    Prune(BackupPruneArgs),
    /// Back up the database, and then store its log every few seconds, until Ctrl-C.
    #[command(after_help = "Example:\n  azekura backup watch --db my.db --every 5 s3://bucket/my.db")]
    Watch(BackupWatchArgs),
}

/// Arguments of `backup create`.
#[derive(Args, Debug)]
pub(crate) struct BackupCreateArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Directory for the links to the files of the database, which exist during the upload [default: that with the
    /// database].
    #[arg(long, value_name = "DIR")]
    pub(crate) scratch: Option<PathBuf>,
}

/// Arguments of `backup verify`.
#[derive(Args, Debug)]
pub(crate) struct BackupVerifyArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Compare lengths only, and download no data.
    #[arg(long)]
    pub(crate) quick: bool,
    /// Check one backup only, and not the log.
    #[arg(long, value_name = "ID")]
    pub(crate) backup: Option<String>,
}

/// Arguments of `backup restore`.
#[derive(Args, Debug)]
pub(crate) struct BackupRestoreArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Directory for the database; it must not exist, or be empty.
    pub(crate) target: PathBuf,
    /// Restore this backup instead of the newest; without --until, none of the log.
    #[arg(long, value_name = "ID")]
    pub(crate) backup: Option<String>,
    /// Restore the last commit that was stored at or before this time, such as 2026-11-28T10:15:00Z.
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    pub(crate) until: Option<u64>,
}

/// Arguments of `backup prune`.
#[derive(Args, Debug)]
pub(crate) struct BackupPruneArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Number of backups to keep.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) keep: u32,
    /// Change nothing, and print what would be removed.
    #[arg(long)]
    pub(crate) dry_run: bool,
}

/// Arguments of `backup watch`.
#[derive(Args, Debug)]
pub(crate) struct BackupWatchArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Seconds between two looks at the log.
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = parse_seconds)]
    pub(crate) every: Duration,
    /// Store what is committed now, and end.
    #[arg(long)]
    pub(crate) once: bool,
    /// As for `create`.
    #[arg(long, value_name = "DIR")]
    pub(crate) scratch: Option<PathBuf>,
}

fn parse_time(text: &str) -> Result<u64, String> {
    let time = chrono::DateTime::parse_from_rfc3339(text).ok();
    let ms = time.and_then(|time| u64::try_from(time.timestamp_millis()).ok());
    ms.ok_or_else(|| "expected a time with a zone, such as 2026-11-28T10:15:00Z or 2026-11-28T12:15:00+02:00".into())
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds| (0.01..=86_400.0).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| "expected a number of seconds, 0.01 to 86400".into())
}

/// A time in milliseconds since 1970 as text.
pub(crate) fn format_time(ms: u64) -> String {
    let time = i64::try_from(ms).ok().and_then(chrono::DateTime::from_timestamp_millis);
    time.map_or_else(|| ms.to_string(), |time| time.to_rfc3339_opts(chrono::SecondsFormat::Millis, true))
}

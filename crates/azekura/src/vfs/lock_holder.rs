//! Finds the processes that hold the lock of a database, where the operating system lists them.

use std::fmt;
use std::fs;
use std::path::Path;

/// Number of processes that a message names.
const NAMED_MAX: usize = 3;
/// How often the table of locks is read until it lists a holder. The system leaves out a lock if others change while it
/// writes the table.
const TABLE_READS_MAX: u32 = 8;

/// A process that holds a lock; see [`lock_holders`].
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("db");
/// use azekura::Config;
/// let db = Config::new(&path).open()?;
/// let error = Config::new(&path).open().unwrap_err(); // `Locked`, and the message names the process too
/// for holder in azekura::fs::lock_holders(error.file().unwrap()) {
///     assert!(holder.is_writer && holder.pid == Some(std::process::id()));
///     println!("{holder}"); // process 4711 ("indexer"), or: this process (4711)
/// }
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LockHolder {
    /// `None` if the process is in another PID namespace.
    pub pid: Option<u32>,
    /// Name of the program; `None` if this process may not read it.
    pub name: Option<String>,
    /// Whether the process writes; a database that is open for reading has a shared lock.
    pub is_writer: bool,
}

/// Example: `process 4711 ("indexer")`.
impl fmt::Display for LockHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.pid, &self.name) {
            (None, _) => f.write_str("a process of another container or of the host"),
            (Some(pid), _) if pid == std::process::id() => write!(f, "this process ({pid})"),
            (Some(pid), Some(name)) => write!(f, "process {pid} (\"{name}\")"),
            (Some(pid), None) => write!(f, "process {pid}"),
        }
    }
}

/// A clause that names the processes; `None` if there are none.
pub(crate) fn describe(holders: &[LockHolder]) -> Option<String> {
    let is_writer = holders.first()?.is_writer;
    let named: Vec<String> = holders.iter().take(NAMED_MAX).map(LockHolder::to_string).collect();
    let more = holders.len() - named.len();
    let names = match (&named[..], more) {
        ([one], 0) => one.clone(),
        ([start @ .., last], 0) => format!("{} and {last}", start.join(", ")),
        _ => format!("{} and {more} more", named.join(", ")),
    };
    let verb = if holders.len() == 1 { "has" } else { "have" };
    Some(format!("{names} {verb} the database open for {}", if is_writer { "writing" } else { "reading" }))
}

/// Returns the processes that hold a lock on `path`: the file of a [`Locked`](crate::ErrorKind::Locked) error. Empty if
/// the operating system does not list them. Linux does.
///
/// ```
/// # let dir = tempfile::tempdir().unwrap();
/// assert!(azekura::fs::lock_holders(&dir.path().join("LOCK")).is_empty()); // there is no such file
/// ```
pub fn lock_holders(path: &Path) -> Vec<LockHolder> {
    let name_of = |pid| {
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
        Some(name.trim_end().to_string())
    };
    let Some(file) = lock_table_id(path) else { return Vec::new() };
    for _ in 0..TABLE_READS_MAX {
        let Ok(table) = fs::read_to_string("/proc/locks") else { break };
        let holders = parse_lock_table(&table, &file, &name_of);
        if !holders.is_empty() {
            return holders;
        }
    }
    Vec::new()
}

/// The file as `/proc/locks` names it: the numbers of the device, and of the file on it.
#[cfg(target_os = "linux")]
fn lock_table_id(path: &Path) -> Option<String> {
    use std::os::linux::fs::MetadataExt;
    let metadata = path.metadata().ok()?;
    let device = metadata.st_dev();
    let major = (device >> 8 & 0xfff) | (device >> 32 & !0xfff);
    let minor = (device & 0xff) | (device >> 12 & !0xff);
    Some(format!("{major:02x}:{minor:02x}:{}", metadata.st_ino()))
}

/// Other systems have no list of locks.
#[cfg(not(target_os = "linux"))]
fn lock_table_id(_: &Path) -> Option<String> {
    None
}

/// Finds the `flock` locks of `file` ("major:minor:inode") in the text of `/proc/locks`. A line is, for example,
/// `1: FLOCK  ADVISORY  WRITE 4711 fe:00:9978303 0 EOF`; the lock of a waiting process has `->` behind its number.
fn parse_lock_table(table: &str, file: &str, name_of: &dyn Fn(u32) -> Option<String>) -> Vec<LockHolder> {
    let mut holders = Vec::new();
    for line in table.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [_, "FLOCK", _, mode, pid, locked, ..] = words[..] else { continue };
        if locked != file {
            continue;
        }
        // A process outside of the PID namespace of this one has the number 0.
        let pid = pid.parse().ok().filter(|pid| *pid != 0);
        // The system lists a lock twice if others change while it writes the table.
        if pid.is_some() && holders.iter().any(|holder: &LockHolder| holder.pid == pid) {
            continue;
        }
        holders.push(LockHolder { pid, name: pid.and_then(name_of), is_writer: mode == "WRITE" });
    }
    holders
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "\
1: FLOCK  ADVISORY  WRITE 4711 fe:00:9978303 0 EOF
1: -> FLOCK  ADVISORY  WRITE 4712 fe:00:9978303 0 EOF
2: POSIX  ADVISORY  WRITE 4713 fe:00:9978303 0 EOF
3: FLOCK  ADVISORY  READ 4714 fe:00:12 0 EOF
4: FLOCK  ADVISORY  READ 0 fe:00:12 0 EOF
5: FLOCK  ADVISORY  READ 4715 fe:00:120 0 EOF
";

    /// Regression: a process with one lock was named twice.
    #[test]
    fn process_is_named_once() {
        let table = TABLE.repeat(2);
        let holders = |file| parse_lock_table(&table, file, &|_| None).iter().map(|one| one.pid).collect::<Vec<_>>();
        assert_eq!(holders("fe:00:9978303"), [Some(4711)]);
        assert_eq!(holders("fe:00:12"), [Some(4714), None, None], "processes without a number may be several");
    }

    #[test]
    fn lock_table_gives_holders_of_one_file() {
        let name_of = |pid| (pid == 4711).then(|| "indexer".to_string());
        let found = |file| parse_lock_table(TABLE, file, &name_of);
        let writer = describe(&found("fe:00:9978303")).unwrap();
        assert_eq!(writer, "process 4711 (\"indexer\") has the database open for writing");
        let readers = describe(&found("fe:00:12")).unwrap();
        assert_eq!(
            readers,
            "process 4714 and a process of another container or of the host have the database open for reading"
        );
        assert_eq!(describe(&found("fe:01:12")), None);
        let many = vec![found("fe:00:120")[0].clone(); 5];
        assert!(describe(&many).unwrap().starts_with("process 4715, process 4715, process 4715 and 2 more have"));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn lock_of_this_process_is_found() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(lock_holders(&dir.path().join("LOCK")), []);
        let file = fs::File::create(dir.path().join("LOCK")).unwrap();
        file.try_lock().unwrap();
        let holders = lock_holders(&dir.path().join("LOCK"));
        assert_eq!(
            describe(&holders).unwrap(),
            format!("this process ({}) has the database open for writing", std::process::id())
        );
    }
}

//! A prefix of an object store: opens it, and reads, writes and lists objects with retries and a rate limit.

use std::fmt;
use std::future::Future;
use std::path::Path as FilePath;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::{TryStream, TryStreamExt};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload};
use tokio::runtime::Runtime;
use tokio::time::Instant;

use crate::error::{BackupError, Result};
use crate::history::sort_backups;
use crate::layout::{BACKUPS, BackupManifest, STORE_OBJECT, StoreRecord, decode_backup, decode_store, to_json};

/// Bytes of a file that are uploaded at a time, and the size of the parts of files that change.
pub(crate) const CHUNK: usize = 8 << 20;
/// Most parts of one object that S3 accepts, with a margin.
const MULTIPART_PARTS_MAX: u64 = 9_000;

/// A place in an object store that holds the backups of one database.
///
/// The calls block: in a program with an asynchronous runtime, make them in a thread for blocking work.
///
/// ```
/// use azekura_backup::{BackupStore, CreateOptions, RestoreOptions};
/// # fn main() -> azekura_backup::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// let db = azekura::Config::new(dir.path().join("db")).open()?;
/// db.open_partition("fruit", Default::default())?.insert("apple", "red")?;
/// let store = BackupStore::open(dir.path().join("backups").to_str().unwrap(), [])?;
/// store.create(&db, &CreateOptions::default(), &mut |_| true)?;
/// store.restore(&dir.path().join("copy"), &RestoreOptions::default(), &mut |_| true)?;
/// let copy = azekura::Config::new(dir.path().join("copy")).open()?;
/// assert_eq!(copy.partition("fruit")?.get("apple")?.unwrap(), "red");
/// # Ok(()) }
/// ```
pub struct BackupStore {
    store: Arc<dyn ObjectStore>,
    prefix: Path,
    runtime: Runtime,
    limiter: RateLimiter,
    pub(crate) concurrency: usize,
    attempts: u32,
    pause: Duration,
    timeout: Duration,
    grace: Duration,
    /// Added to the time of the store, in tests.
    pub(crate) later: Duration,
    pub(crate) clock: Arc<dyn Fn() -> u64 + Send + Sync>,
}

impl BackupStore {
    /// Opens a directory, which is created if it is missing, or a URL: `file:///path`, `memory:///`, and with the
    /// features of this crate `s3://bucket/prefix`, `gs://bucket/prefix` and `az://container/prefix`.
    ///
    /// `options` are those of `object_store`, such as `("aws_region", "eu-central-1")`. Unknown ones are ignored. Of
    /// the environment variables of a process, give only those with the prefix of the cloud (`AWS_`, `AZURE_`,
    /// `GOOGLE_`): options have short names too, such as `token` or `endpoint`, which other programs use. Uploads to S3
    /// have a checksum that the server compares: `("aws_checksum_algorithm", "sha256")` unless another is given; an
    /// empty one is for servers that accept none.
    ///
    /// # Errors
    /// `Invalid` if the URL is not one of these, or has a password.
    pub fn open(place: &str, options: impl IntoIterator<Item = (String, String)>) -> Result<BackupStore> {
        let url = url::Url::parse(place).ok().filter(|url| place.contains("://") && !url.scheme().is_empty());
        let Some(url) = url else { return BackupStore::open_directory(FilePath::new(place)) };
        if url.scheme() == "file" {
            let path = url.to_file_path().map_err(|()| BackupError::invalid(format!("{place} names no directory")))?;
            return BackupStore::open_directory(&path);
        }
        if url.password().is_some() {
            // Messages and logs repeat the place.
            return Err(BackupError::invalid("the URL has a password: give credentials as options"));
        }
        // A second call fails, and changes nothing.
        #[cfg(feature = "_cloud")]
        drop(rustls::crypto::ring::default_provider().install_default());
        let (store, prefix) = object_store::parse_url_opts(&url, client_options(options)).map_err(|error| {
            BackupError::invalid(format!("{place} cannot be opened: {error}; each cloud has a feature of this crate"))
        })?;
        BackupStore::new(Arc::from(store), prefix.as_ref())
    }

    fn open_directory(path: &FilePath) -> Result<BackupStore> {
        std::fs::create_dir_all(path).map_err(|error| BackupError::io("create the directory", path, error))?;
        let store = LocalFileSystem::new_with_prefix(path).map_err(|error| {
            BackupError::invalid(format!("the directory {} cannot be opened: {error}", path.display()))
        })?;
        BackupStore::new(Arc::new(store.with_fsync(true)), "")
    }

    /// Uses an object store that the caller has built. The connections of a cloud client belong to the runtime in which
    /// they are used, so the client must not be used elsewhere.
    ///
    /// # Errors
    /// `Invalid` if `prefix` is not a path; `Io` if the operating system refuses what a runtime needs.
    pub fn new(store: Arc<dyn ObjectStore>, prefix: &str) -> Result<BackupStore> {
        let prefix = Path::parse(prefix).map_err(|error| BackupError::invalid(error.to_string()))?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| BackupError::io("start a runtime", "", error))?;
        Ok(BackupStore {
            store,
            prefix,
            runtime,
            limiter: RateLimiter::default(),
            concurrency: 4,
            attempts: 5,
            pause: Duration::from_millis(200),
            timeout: Duration::from_secs(5 * 60),
            grace: Duration::from_secs(24 * 60 * 60),
            later: Duration::ZERO,
            clock: Arc::new(|| {
                let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
                now.map_or(0, |time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
            }),
        })
    }

    /// Uploads and downloads at most this many bytes per second. Default: unlimited.
    #[must_use]
    pub fn rate_limit(mut self, bytes_per_second: Option<u64>) -> BackupStore {
        self.limiter.bytes_per_second = bytes_per_second.map(|rate| rate.max(1));
        self
    }

    /// Number of objects that are uploaded at a time, at least 1. Each needs up to 16 MiB of memory. Default: 4.
    #[must_use]
    pub fn concurrency(mut self, n: usize) -> BackupStore {
        self.concurrency = n.max(1);
        self
    }

    /// How often a request is tried that failed, and the pause before the second attempt, which doubles. Default: 5
    /// times, 200 ms. An upload of more than 8 MiB is repeated as a whole. The clients of cloud stores retry requests
    /// in addition, until an attempt ends by its [timeout](BackupStore::timeout).
    #[must_use]
    pub fn retries(mut self, attempts: u32, pause: Duration) -> BackupStore {
        (self.attempts, self.pause) = (attempts.max(1), pause);
        self
    }

    /// How long an attempt waits for the answer of the store, the next bytes of a body, or the next entry of a listing;
    /// and four seconds more for each MiB that it sends or receives meanwhile. Then the attempt has failed. Default: 5
    /// minutes. The clients of cloud stores have the option `timeout` in addition, for a whole request: 2 hours. A call
    /// to a local file system that never returns cannot be ended: the thread that makes it stays, and the store waits
    /// for it when it is dropped.
    #[must_use]
    pub fn timeout(mut self, longest: Duration) -> BackupStore {
        self.timeout = longest;
        self
    }

    /// The grace time of a store that does not exist yet: [`prune`](BackupStore::prune) deletes no object that was
    /// unused for less. A store keeps the one that it was created with. Default: 24 hours.
    #[must_use]
    pub fn grace(mut self, grace: Duration) -> BackupStore {
        self.grace = grace;
        self
    }

    /// The clock that names and times backups, in milliseconds since 1970. Default: that of the system.
    #[must_use]
    pub fn clock(mut self, clock: impl Fn() -> u64 + Send + Sync + 'static) -> BackupStore {
        self.clock = Arc::new(clock);
        self
    }

    /// Acts as if it were so much later. For tests: it shortens the protection of objects.
    #[doc(hidden)]
    #[must_use]
    pub fn later(mut self, by: Duration) -> BackupStore {
        self.later = by;
        self
    }

    pub(crate) fn block_on<T>(&self, work: impl Future<Output = T>) -> T {
        self.runtime.block_on(work)
    }

    /// The path of an object of this crate.
    pub(crate) fn path(&self, object: &str) -> Path {
        // The names of this crate have no empty segments and no characters that are encoded.
        object.split('/').fold(self.prefix.clone(), |path, part| path.join(part))
    }

    /// The name of an object below the prefix.
    fn name_of(&self, path: &Path) -> String {
        let whole = path.as_ref();
        let rest = whole.strip_prefix(self.prefix.as_ref()).unwrap_or(whole);
        rest.trim_start_matches('/').to_owned()
    }

    /// The answer to a request that transfers this many bytes, or an error if it does not come in time.
    async fn answer<T>(
        &self,
        bytes: u64,
        request: impl Future<Output = object_store::Result<T>>,
    ) -> object_store::Result<T> {
        let longest = self.timeout.saturating_add(Duration::from_secs((bytes >> 20).saturating_mul(4)));
        tokio::time::timeout(longest, request).await.unwrap_or_else(|_| {
            let message = format!("no answer for {longest:?}");
            let source = Box::new(std::io::Error::new(std::io::ErrorKind::TimedOut, message));
            Err(object_store::Error::Generic { store: "azekura-backup", source })
        })
    }

    /// The next item of a body or a listing, or an error if it does not come in time.
    async fn next<T>(
        &self,
        stream: &mut (impl TryStream<Ok = T, Error = object_store::Error> + Unpin),
    ) -> object_store::Result<Option<T>> {
        self.answer(0, stream.try_next()).await
    }

    /// Repeats a request while it fails for a reason that may pass.
    pub(crate) async fn retry<T>(
        &self,
        object: &str,
        mut request: impl AsyncFnMut() -> object_store::Result<T>,
    ) -> Result<T> {
        let mut pause = self.pause;
        for attempt in 1.. {
            match request().await {
                Ok(value) => return Ok(value),
                Err(error) => {
                    let may_pass =
                        matches!(error, object_store::Error::Generic { .. } | object_store::Error::JoinError { .. });
                    let error = BackupError::store(object, error);
                    if attempt >= self.attempts || !may_pass || matches!(error, BackupError::Full { .. }) {
                        return Err(error);
                    }
                }
            }
            tokio::time::sleep(pause).await;
            pause = pause.saturating_mul(2).min(Duration::from_secs(10));
        }
        unreachable!("the loop ends after the last attempt")
    }

    /// Length and time of an object.
    pub(crate) async fn head(&self, object: &str) -> Result<ObjectMeta> {
        let path = self.path(object);
        self.retry(object, || self.answer(0, self.store.head(&path))).await
    }

    /// Writes a small object, and checks its length.
    pub(crate) async fn put(&self, object: &str, bytes: Bytes, mode: PutMode) -> Result<()> {
        let path = self.path(object);
        self.limiter.wait(bytes.len() as u64).await;
        self.retry(object, || {
            let options = PutOptions { mode: mode.clone(), ..PutOptions::default() };
            let payload = PutPayload::from_bytes(bytes.clone());
            self.answer(bytes.len() as u64, self.store.put_opts(&path, payload, options))
        })
        .await?;
        self.check_len(object, bytes.len() as u64).await
    }

    /// Writes an object that must not exist. Returns false if it does.
    ///
    /// A request whose answer was lost is repeated, and then finds its own object. So an object with the same bytes
    /// counts as written.
    pub(crate) async fn put_new(&self, object: &str, bytes: Bytes) -> Result<bool> {
        match self.put(object, bytes.clone(), PutMode::Create).await {
            Ok(()) => Ok(true),
            Err(BackupError::Store { source: object_store::Error::AlreadyExists { .. }, .. }) => {
                Ok(self.get(object).await? == bytes)
            }
            Err(error) => {
                // Only a part was stored, under a name that is not free any more.
                if let BackupError::WrongContent { .. } = error {
                    self.delete(object).await?;
                }
                Err(error)
            }
        }
    }

    /// Uploads an object of `len` bytes in pieces, each of which `next` returns for its offset. After each, `sent` is
    /// called with its bytes. After an error the pieces are removed, which a cloud store would otherwise keep, and the
    /// upload begins again at offset 0.
    pub(crate) async fn put_large(
        &self,
        object: &str,
        len: u64,
        mut next: impl FnMut(u64, usize) -> Result<Bytes>,
        sent: &mut impl AsyncFnMut(u64) -> Result<()>,
    ) -> Result<()> {
        let path = self.path(object);
        let piece = (CHUNK as u64).max(len.div_ceil(MULTIPART_PARTS_MAX));
        let mut failed_in_caller: Option<BackupError> = None;
        self.retry(object, async || {
            let mut upload = self.answer(0, self.store.put_multipart(&path)).await?;
            let sending = async {
                let mut at = 0;
                while at < len {
                    let n = piece.min(len - at);
                    let bytes = next(at, usize::try_from(n).unwrap_or(CHUNK))?;
                    self.limiter.wait(n).await;
                    if let Err(error) = self.answer(n, upload.put_part(PutPayload::from_bytes(bytes))).await {
                        return Ok(Err(error));
                    }
                    sent(n).await?;
                    at += n;
                }
                Ok(self.answer(len, upload.complete()).await.map(drop))
            };
            let ended = sending.await;
            if !matches!(ended, Ok(Ok(()))) {
                drop(self.answer(0, upload.abort()).await);
            }
            ended.unwrap_or_else(|error| {
                failed_in_caller = Some(error);
                Ok(())
            })
        })
        .await?;
        match failed_in_caller {
            Some(error) => Err(error),
            None => self.check_len(object, len).await,
        }
    }

    /// # Errors
    /// `WrongContent` if the store says that the object has another length.
    async fn check_len(&self, object: &str, len: u64) -> Result<()> {
        let stored = self.head(object).await?.size;
        match stored == len {
            true => Ok(()),
            false => Err(BackupError::wrong(object, format!("{len} bytes were written, the store has {stored}"))),
        }
    }

    /// Reads a whole small object.
    pub(crate) async fn get(&self, object: &str) -> Result<Bytes> {
        let path = self.path(object);
        let whole = || async {
            let found = self.answer(0, self.store.get(&path)).await?;
            self.answer(found.range.end - found.range.start, found.bytes()).await
        };
        let bytes = self.retry(object, whole).await?;
        self.limiter.wait(bytes.len() as u64).await;
        Ok(bytes)
    }

    /// Reads the first bytes of an object.
    pub(crate) async fn get_start(&self, object: &str, len: u64) -> Result<Bytes> {
        let path = self.path(object);
        self.retry(object, || self.answer(0, self.store.get_range(&path, 0..len))).await
    }

    /// Reads an object piece by piece. `piece` gets the pieces from the beginning again if an attempt fails: then it
    /// is called with `None`.
    pub(crate) async fn get_large(
        &self,
        object: &str,
        piece: &mut impl FnMut(Option<&[u8]>) -> Result<()>,
    ) -> Result<()> {
        let path = self.path(object);
        let mut refused = None;
        let refused_by_caller = &mut refused;
        for attempt in 1.. {
            piece(None)?;
            let read = async {
                let mut body = self.answer(0, self.store.get(&path)).await?.into_stream();
                while let Some(bytes) = self.next(&mut body).await? {
                    self.limiter.wait(bytes.len() as u64).await;
                    if let Err(error) = piece(Some(&bytes)) {
                        *refused_by_caller = Some(error);
                        break;
                    }
                }
                Ok::<_, object_store::Error>(())
            };
            match read.await {
                Ok(()) => break,
                Err(error) => {
                    let may_pass = matches!(error, object_store::Error::Generic { .. });
                    if attempt >= self.attempts || !may_pass {
                        return Err(BackupError::store(object, error));
                    }
                    tokio::time::sleep(self.pause).await;
                }
            }
        }
        refused.map_or(Ok(()), Err)
    }

    /// All objects of a folder with their names, sorted.
    pub(crate) async fn list_folder(&self, folder: &str) -> Result<Vec<(String, ObjectMeta)>> {
        let path = self.path(folder);
        let list = || async {
            let (mut listed, mut named) = (self.store.list(Some(&path)), Vec::new());
            while let Some(meta) = self.next(&mut listed).await? {
                named.push((self.name_of(&meta.location), meta));
            }
            Ok(named)
        };
        let mut named = self.retry(folder, list).await?;
        named.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(named)
    }

    /// As [`list_folder`](BackupStore::list_folder), without what other programs put into directories.
    pub(crate) async fn list_json(&self, folder: &str) -> Result<Vec<(String, ObjectMeta)>> {
        let mut found = self.list_folder(folder).await?;
        found.retain(|(object, _)| object.ends_with(".json"));
        Ok(found)
    }

    /// Deletes an object. One that does not exist is no error.
    pub(crate) async fn delete(&self, object: &str) -> Result<()> {
        let path = self.path(object);
        match self.retry(object, || self.answer(0, self.store.delete(&path))).await {
            Ok(()) | Err(BackupError::Missing { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// The record of the store, which must exist.
    ///
    /// # Errors
    /// `NoBackup` if there is nothing, `NotABackupStore` if there is something else.
    pub(crate) async fn existing(&self) -> Result<StoreRecord> {
        match self.get(STORE_OBJECT).await {
            Ok(bytes) => decode_store(&self.display(STORE_OBJECT), &bytes),
            Err(BackupError::Missing { .. }) => match self.any_object().await? {
                Some(object) => Err(BackupError::NotABackupStore { object }),
                None => Err(BackupError::NoBackup { message: format!("nothing is stored in {}", self.display("")) }),
            },
            Err(error) => Err(error),
        }
    }

    /// The record of the store for this database. Creates it if nothing is there.
    ///
    /// # Errors
    /// `OtherDatabase`, `NotABackupStore`.
    pub(crate) async fn existing_or_new(&self, database: &str) -> Result<StoreRecord> {
        let mut record = self.existing().await;
        if let Err(BackupError::NoBackup { .. }) = record {
            let new = StoreRecord::new(database.to_owned(), self.grace.as_secs());
            self.put_new(STORE_OBJECT, to_json(&new).into()).await?;
            // Another writer may have been first.
            record = self.existing().await;
        }
        let record = record?;
        match record.database == database {
            true => Ok(record),
            false => Err(BackupError::OtherDatabase { stored: record.database, found: database.to_owned() }),
        }
    }

    /// # Errors
    /// `Invalid` if the store ignores that an object must not exist. Then two watchers would overwrite each other's
    /// log.
    pub(crate) async fn check_create_only(&self) -> Result<()> {
        let record = self.get(STORE_OBJECT).await?;
        match self.put(STORE_OBJECT, record, PutMode::Create).await {
            Err(BackupError::Store { source: object_store::Error::AlreadyExists { .. }, .. }) => Ok(()),
            Err(error) => Err(error),
            Ok(()) => Err(BackupError::invalid(format!(
                "the store overwrites objects that exist although it must not ({})",
                self.display(STORE_OBJECT)
            ))),
        }
    }

    async fn any_object(&self) -> Result<Option<String>> {
        let prefix = Some(&self.prefix).filter(|prefix| !prefix.as_ref().is_empty());
        let first = || async { self.next(&mut self.store.list(prefix)).await };
        Ok(self.retry(self.prefix.as_ref(), first).await?.map(|meta| meta.location.to_string()))
    }

    /// The manifests of all backups of the database, oldest first.
    ///
    /// # Errors
    /// `WrongContent` if one of them is damaged; `OtherDatabase`.
    pub(crate) async fn manifests(&self, database: &str) -> Result<Vec<(String, BackupManifest)>> {
        let (manifests, damaged) = self.manifests_and_damage(database).await?;
        damaged.into_iter().next().map_or(Ok(manifests), Err)
    }

    /// The manifests that can be read, oldest first, and the errors of the others.
    pub(crate) async fn manifests_and_damage(
        &self,
        database: &str,
    ) -> Result<(Vec<(String, BackupManifest)>, Vec<BackupError>)> {
        let (mut manifests, mut damaged) = (Vec::new(), Vec::new());
        for (object, _) in self.list_json(BACKUPS).await? {
            let decoded = self.get(&object).await.and_then(|bytes| decode_backup(&object, &bytes));
            match decoded {
                Ok(manifest) if manifest.database != database => {
                    let found = database.to_owned();
                    damaged.push(BackupError::OtherDatabase { stored: manifest.database, found });
                }
                Ok(manifest) => manifests.push((object, manifest)),
                // Removed by `prune` after it was listed.
                Err(BackupError::Missing { .. }) => {}
                Err(error @ BackupError::WrongContent { .. }) => damaged.push(error),
                Err(error) => return Err(error),
            }
        }
        sort_backups(&mut manifests);
        Ok((manifests, damaged))
    }

    /// An object with the store that it is in, for messages.
    pub(crate) fn display(&self, object: &str) -> String {
        format!("{}/{}", self.store, self.path(object)).trim_end_matches('/').to_owned()
    }
}

impl fmt::Debug for BackupStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The debug text of the clients of some clouds has their credentials.
        let store = format_args!("{}", self.store);
        f.debug_struct("BackupStore").field("store", &store).field("prefix", &self.prefix).finish_non_exhaustive()
    }
}

/// The options of the client of a cloud store, of which a later one replaces an earlier one of the same name.
fn client_options(given: impl IntoIterator<Item = (String, String)>) -> Vec<(String, String)> {
    // By default a client ends each request after 30 seconds, however many bytes it sends. `BackupStore::timeout` ends
    // a request earlier than this.
    let mut options = vec![("timeout".to_owned(), "2 hours".to_owned())];
    options.extend(with_upload_checksum(given));
    options
}

/// The option of `object_store` for a checksum that S3 compares with what it receives.
const UPLOAD_CHECKSUM: &str = "aws_checksum_algorithm";

/// The options with names in lower case. Uploads to S3 have a SHA-256 unless another checksum is given, or an empty one
/// for none. Other stores ignore the option.
fn with_upload_checksum(options: impl IntoIterator<Item = (String, String)>) -> Vec<(String, String)> {
    let mut options: Vec<_> = options.into_iter().map(|(key, value)| (key.to_ascii_lowercase(), value)).collect();
    let is_checksum = |key: &str| key == UPLOAD_CHECKSUM || Some(key) == UPLOAD_CHECKSUM.strip_prefix("aws_");
    if !options.iter().any(|(key, _)| is_checksum(key)) {
        options.push((UPLOAD_CHECKSUM.into(), "sha256".into()));
    }
    options.retain(|(key, value)| !is_checksum(key) || !value.is_empty());
    options
}

/// How much too early a transfer may begin. Timers of the runtime count milliseconds. Without this, a body in pieces
/// of 16 KiB would wait for a millisecond after every second piece, so that no rate above 32 MB/s were reached.
const EARLY: Duration = Duration::from_millis(5);

/// Delays transfers so that their bytes stay below a rate.
#[derive(Default)]
struct RateLimiter {
    bytes_per_second: Option<u64>,
    /// Nanoseconds since `begin` until which earlier transfers use the rate.
    busy_until: AtomicU64,
    begin: std::sync::OnceLock<Instant>,
}

impl RateLimiter {
    /// Waits until `bytes` may be transferred.
    async fn wait(&self, bytes: u64) {
        let Some(rate) = self.bytes_per_second else { return };
        let now = u64::try_from(self.begin.get_or_init(Instant::now).elapsed().as_nanos()).unwrap_or(u64::MAX);
        // Rounded up, so that many small transfers stay below the rate too.
        let cost = (u128::from(bytes) * 1_000_000_000).div_ceil(u128::from(rate));
        let cost = u64::try_from(cost).unwrap_or(u64::MAX);
        // One task at a time runs, so nothing changes between the two accesses.
        let start = self.busy_until.load(Ordering::Relaxed).max(now);
        self.busy_until.store(start.saturating_add(cost), Ordering::Relaxed);
        let wait = Duration::from_nanos(start - now).saturating_sub(EARLY);
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Virtual time from the first of `n` transfers of `bytes` bytes to the end of the last.
    fn time_of(n: u32, bytes: u64, rate: Option<u64>) -> Duration {
        let store = BackupStore::open("memory:///", []).unwrap().rate_limit(rate);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let start = Instant::now();
            for _ in 0..n {
                store.limiter.wait(bytes).await;
            }
            // One more transfer waits for the end of the last.
            store.limiter.wait(0).await;
            start.elapsed()
        })
    }

    #[test]
    fn rate_limit_gives_the_asked_rate() {
        for (n, bytes, rate, expected_ms) in [
            (1, 1_000, 1_000, 1_000),
            (10, 1_000, 1_000, 10_000),
            (4, 8 << 20, 8 << 20, 4_000),
            (1_000, 16 << 10, 16_384_000, 1_000),
            // Transfers that take less than a millisecond, and less than a microsecond.
            (10_000, 16 << 10, 163_840_000, 1_000),
            (60_000, 1, 3_000_000, 20),
        ] {
            let (time, expected) = (time_of(n, bytes, Some(rate)), Duration::from_millis(expected_ms));
            let latest = expected + Duration::from_millis(2);
            assert!(expected - EARLY <= time && time <= latest, "{n} * {bytes} at {rate}: {time:?}");
        }
    }

    #[test]
    fn rate_limit_accepts_absurd_values() {
        assert_eq!(time_of(5, u64::MAX, None), Duration::ZERO);
        assert_eq!(time_of(5, 1 << 30, Some(u64::MAX)), Duration::ZERO);
        // A rate of 0 is one of 1.
        assert_eq!(time_of(3, 1, Some(0)), Duration::from_secs(3) - EARLY);
        // The largest delay is 584 years, of which a timer of the runtime waits 30.
        assert!(time_of(2, u64::MAX, Some(0)) > Duration::from_secs(29 * 365 * 24 * 60 * 60));
    }

    #[test]
    fn uploads_to_s3_have_a_checksum() {
        let checksum = |key: &str, value: &str| {
            let options = with_upload_checksum([("AWS_REGION".into(), "here".into()), (key.into(), value.into())]);
            assert_eq!(options[0], ("aws_region".into(), "here".into()));
            options.into_iter().find(|(key, _)| key.ends_with("checksum_algorithm")).map(|(_, value)| value)
        };
        assert_eq!(checksum("other", "").unwrap(), "sha256");
        assert_eq!(checksum("AWS_CHECKSUM_ALGORITHM", "crc64nvme").unwrap(), "crc64nvme");
        assert_eq!(checksum("checksum_algorithm", ""), None);
    }

    /// Regression: a client ended every request after 30 seconds, so that an object of 1 GiB was never uploaded.
    #[test]
    fn clients_have_time_for_the_largest_object() {
        let timeout = |given: &str| {
            let mut options = client_options([(given.to_owned(), "5 seconds".to_owned())]).into_iter();
            options.rfind(|(key, _)| key.ends_with("timeout")).unwrap()
        };
        assert_eq!(timeout("other"), ("timeout".to_owned(), "2 hours".to_owned()));
        assert_eq!(timeout("AWS_TIMEOUT").1, "5 seconds");
        assert_eq!(timeout("TIMEOUT").1, "5 seconds");
    }

    /// The client reads a duration only when it is built.
    #[cfg(feature = "aws")]
    #[test]
    fn default_options_are_those_of_a_client() {
        let open = |key: &str, value: &str| {
            let keys = [("aws_access_key_id", "a"), ("aws_secret_access_key", "b"), ("aws_region", "c"), (key, value)];
            BackupStore::open("s3://bucket/prefix", keys.map(|(key, value)| (key.to_owned(), value.to_owned())))
        };
        open("other", "").unwrap();
        open("timeout", "often").unwrap_err();
    }

    #[test]
    fn time_without_transfers_earns_no_burst() {
        let limiter = RateLimiter { bytes_per_second: Some(1_000), ..RateLimiter::default() };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async {
            limiter.wait(1_000).await;
            tokio::time::sleep(Duration::from_secs(60)).await;
            let start = Instant::now();
            limiter.wait(1_000).await;
            limiter.wait(1_000).await;
            assert_eq!(start.elapsed(), Duration::from_secs(1) - EARLY);
        });
    }
}

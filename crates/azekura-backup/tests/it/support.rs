//! Databases to back up, digests of them, and an object store that fails.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::Path as FilePath;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use azekura::testing::SeededRng;
use azekura::{
    Config, Database, EngineType, KvSeparationOptions, PartitionComponents, PartitionCreateOptions, PersistMode,
    PmemOptions,
};
use azekura_backup::{BackupError, BackupStore, CreateOptions, CreateReport, RestoreOptions, RestoreReport};
use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::stream::{BoxStream, StreamExt};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result, UploadPart,
};

/// A new and empty place: in the store that `AZEKURA_BACKUP_URL` names, otherwise in memory.
pub(crate) struct Place {
    memory: Option<Arc<InMemory>>,
    prefix: String,
}

impl Place {
    pub(crate) fn new() -> Place {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        if !is_remote() {
            return Place { memory: Some(Arc::default()), prefix: "db".into() };
        }
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        Place { memory: None, prefix: format!("{}-{number}", std::process::id()) }
    }

    /// A client of the store. The connections of a client belong to one runtime.
    pub(crate) fn objects(&self) -> Arc<dyn ObjectStore> {
        if let Some(memory) = &self.memory {
            return Arc::clone(memory) as _;
        }
        let url = url::Url::parse(&std::env::var("AZEKURA_BACKUP_URL").unwrap()).unwrap();
        #[cfg(feature = "aws")]
        drop(rustls::crypto::ring::default_provider().install_default());
        let variables = std::env::vars().map(|(key, value)| (key.to_ascii_lowercase(), value));
        Arc::from(object_store::parse_url_opts(&url, variables).unwrap().0)
    }

    /// Opens the place without pauses between attempts.
    pub(crate) fn open(&self) -> BackupStore {
        self.open_through(self.objects(), 1)
    }

    /// Opens the place through another store.
    pub(crate) fn open_through(&self, objects: Arc<dyn ObjectStore>, attempts: u32) -> BackupStore {
        BackupStore::new(objects, &self.prefix).unwrap().retries(attempts, Duration::ZERO).concurrency(1)
    }

    /// All objects with their lengths, by name below the prefix.
    pub(crate) fn lens(&self) -> BTreeMap<String, u64> {
        let prefix = Path::parse(&self.prefix).unwrap();
        let objects = self.objects();
        let metas = run(objects.list(Some(&prefix)).collect::<Vec<_>>());
        let named = metas.into_iter().map(|meta| meta.unwrap());
        named.map(|meta| (meta.location.as_ref()[prefix.as_ref().len() + 1..].to_owned(), meta.size)).collect()
    }

    pub(crate) fn path(&self, name: &str) -> Path {
        Path::parse(format!("{}/{name}", self.prefix)).unwrap()
    }

    pub(crate) fn bytes(&self, name: &str) -> Bytes {
        let path = self.path(name);
        run(async { self.objects().get_opts(&path, GetOptions::default()).await.unwrap().bytes().await.unwrap() })
    }

    pub(crate) fn put(&self, name: &str, bytes: impl Into<Bytes>) {
        let path = self.path(name);
        run(self.objects().put_opts(&path, PutPayload::from_bytes(bytes.into()), PutOptions::default())).unwrap();
    }

    pub(crate) fn remove(&self, name: &str) {
        let path = self.path(name);
        run(self.objects().delete_stream(futures_util::stream::iter([Ok(path)]).boxed()).collect::<Vec<_>>());
    }
}

/// Replaces the manifest of a backup by another text.
pub(crate) fn edit_manifest(place: &Place, id: &str, edit: impl Fn(String) -> String) {
    let name = place.lens().into_keys().find(|name| name.starts_with(&format!("backups/{id}-"))).unwrap();
    let text = edit(String::from_utf8(place.bytes(&name).to_vec()).unwrap());
    place.remove(&name);
    let checksum = xxhash_rust::xxh3::xxh3_128(text.as_bytes());
    place.put(&format!("backups/{id}-{checksum:032x}.json"), text);
}

/// Whether the tests use a server, which takes longer than memory.
pub(crate) fn is_remote() -> bool {
    std::env::var_os("AZEKURA_BACKUP_URL").is_some()
}

/// Which of the requests and states the searches try.
pub(crate) fn stride() -> usize {
    if is_remote() { 7 } else { 1 }
}

fn run<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
}

/// The partitions of the test databases: tables, tables with blob files, and a pool.
const PARTITIONS: [&str; 3] = ["plain", "blobs", "pool"];

/// Opens a database without background work, so that nothing depends on the scheduler.
pub(crate) fn open(path: &FilePath) -> Database {
    let db = Config::new(path).workers(0).sync_interval(None).open().unwrap();
    for name in PARTITIONS {
        let options = match name {
            "blobs" => PartitionCreateOptions::default().with_kv_separation(KvSeparationOptions::default()),
            "pool" => {
                let pool = PmemOptions::default().max_size(1 << 20).growth_step(256 << 10);
                PartitionCreateOptions::default().engine(EngineType::Pmem(pool))
            }
            _ => PartitionCreateOptions::default(),
        };
        let operator = PartitionComponents::default().merge_operator(azekura::merge_operators::append(","));
        db.open_partition_with(name, options, operator).unwrap();
    }
    db
}

/// Commits a random batch over all partitions.
pub(crate) fn commit(db: &Database, rng: &mut SeededRng) {
    let mut batch = db.batch();
    for _ in 0..1 + rng.below(6) {
        let partition = db.partition(PARTITIONS[rng.below(3) as usize]).unwrap();
        let key = format!("key {:03}", rng.below(300));
        let len = if rng.below(10) == 0 { 9_000 } else { rng.below(100) as usize };
        let value: Vec<u8> = (0..len).map(|_| rng.below(256) as u8).collect();
        match rng.below(12) {
            0 => batch.remove(&partition, &key),
            1 => batch.remove_range(&partition, key.clone()..format!("{key}9")),
            2 => batch.merge(&partition, &key, "x"),
            3 => batch.insert_with_expiry(&partition, &key, &value, Some(4_000_000_000_000)),
            _ => batch.insert(&partition, &key, &value),
        }
    }
    match batch.commit() {
        // Pools have no operands and no expiry times.
        Err(error) if error.kind() == azekura::ErrorKind::Unsupported => commit(db, rng),
        other => other.unwrap(),
    }
}

/// A database with tables, blob files, range deletes, a pool, and commits in the log.
pub(crate) fn filled(path: &FilePath, seed: u64) -> Database {
    let (db, mut rng) = (open(path), SeededRng::with_stream(seed, 0));
    for i in 0..200 {
        commit(&db, &mut rng);
        if i % 70 == 69 {
            db.list_partitions().iter().for_each(|name| db.partition(name).unwrap().flush().unwrap());
        }
    }
    db
}

/// Every entry of every partition, with its expiry time.
pub(crate) type Content = BTreeMap<String, Vec<(Vec<u8>, Vec<u8>, Option<u64>)>>;

pub(crate) fn content(db: &Database) -> Content {
    let entries = |name: &String| {
        let entries = db.partition(name).unwrap().entries();
        let entries = entries.map(|entry| entry.unwrap());
        entries.map(|of| (of.key().to_vec(), of.value().unwrap().to_vec(), of.expiry_ms())).collect()
    };
    db.list_partitions().into_iter().map(|name| (name.clone(), entries(&name))).collect()
}

/// The content of a directory, which must be a whole database without damage.
pub(crate) fn content_at(path: &FilePath) -> Content {
    let disk: Arc<dyn azekura::fs::Fs> = Arc::new(azekura::fs::DiskFs::new());
    let report = azekura::inspect::verify(&disk, path, &mut |_, _| {}).unwrap();
    assert!(report.is_clean(), "{report:?}");
    let db = open(path);
    let content = content(&db);
    db.close().unwrap();
    content
}

pub(crate) fn create(store: &BackupStore, db: &Database) -> Result<CreateReport, BackupError> {
    store.create(db, &CreateOptions::default(), &mut |_| true)
}

pub(crate) fn restore(store: &BackupStore, path: &FilePath, how: RestoreOptions) -> Result<RestoreReport, BackupError> {
    store.restore(path, &how, &mut |_| true)
}

/// A database with a table of this many bytes.
pub(crate) fn with_large_table(path: &FilePath, len: usize) -> Database {
    let (db, mut rng) = (open(path), SeededRng::with_stream(len as u64, 0));
    let value: Vec<u8> = (0..len).map(|_| rng.below(256) as u8).collect();
    let plain = db.partition("plain").unwrap();
    plain.insert("large", value).unwrap();
    plain.flush().unwrap();
    db
}

pub(crate) fn sync(db: &Database) {
    db.persist(PersistMode::SyncData).unwrap();
}

/// What a [`FaultStore`] does with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// It fails, and nothing is done.
    Refused,
    /// It is done, and the answer is lost.
    AnswerLost,
    /// Half of the bytes are stored or arrive, and it fails.
    HalfDone,
    /// Half of the bytes are stored or arrive, and it succeeds.
    Truncated,
    /// Nothing is done, and no answer comes.
    Hangs,
    /// It is done, or half of the body arrives, and nothing more comes.
    HangsLater,
}

/// Does not end. Meanwhile the clock of the runtime goes on to the next timer at once. It panics after the longest
/// timeout of the tests.
async fn hang<T>() -> T {
    struct Resume;
    impl Drop for Resume {
        fn drop(&mut self) {
            tokio::time::resume();
        }
    }
    tokio::time::pause();
    let _resume = Resume;
    tokio::time::sleep(Duration::from_secs(30 * 24 * 60 * 60)).await;
    panic!("a request has no timeout")
}

/// Passes requests on, and fails chosen ones.
#[derive(Debug)]
pub(crate) struct FaultStore {
    inner: Arc<dyn ObjectStore>,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    requests: u64,
    /// The numbers of the requests of uploads in parts.
    upload_requests: Vec<u64>,
    /// The request with this number fails.
    fail_at: Option<(u64, Fault)>,
    /// Every later request fails too, as after a kill.
    is_dead_after: bool,
    /// Every n-th request fails.
    every: Option<u64>,
    /// Every write fails with the error of a full disk.
    is_full: bool,
    /// Listings do not show objects that were written since.
    hidden: Option<Vec<Path>>,
    /// Listings show these objects as 25 hours older than they are.
    aged: Vec<Path>,
    hook: Option<Hook>,
    /// Objects that must not exist are overwritten.
    overwrites: bool,
    /// Uploads in parts that were neither completed nor aborted.
    open_uploads: u64,
}

/// Called before a request ("put", "part", "delete") for an object, or before the listing ("list") of a folder.
#[derive(Clone)]
struct Hook(Arc<HookFn>);

type HookFn = dyn Fn(&str, &Path) + Send + Sync;

impl fmt::Debug for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hook")
    }
}

impl FaultStore {
    pub(crate) fn new(inner: Arc<dyn ObjectStore>) -> Arc<FaultStore> {
        Arc::new(FaultStore { inner, state: Arc::default() })
    }

    fn with(inner: Arc<dyn ObjectStore>, state: State) -> Arc<FaultStore> {
        Arc::new(FaultStore { inner, state: Arc::new(Mutex::new(state)) })
    }

    /// The process ends at request `k`.
    pub(crate) fn killed_at(inner: Arc<dyn ObjectStore>, k: u64, fault: Fault) -> Arc<FaultStore> {
        let state = State { fail_at: Some((k, fault)), is_dead_after: true, ..State::default() };
        FaultStore::with(inner, state)
    }

    /// Request `k` has this fault.
    pub(crate) fn fault_at(inner: Arc<dyn ObjectStore>, k: u64, fault: Fault) -> Arc<FaultStore> {
        let state = State { fail_at: Some((k, fault)), ..State::default() };
        FaultStore::with(inner, state)
    }

    /// Every `n`-th request fails, as with a store that throttles.
    pub(crate) fn throttled(inner: Arc<dyn ObjectStore>, n: u64) -> Arc<FaultStore> {
        FaultStore::with(inner, State { every: Some(n), ..State::default() })
    }

    pub(crate) fn full(inner: Arc<dyn ObjectStore>) -> Arc<FaultStore> {
        FaultStore::with(inner, State { is_full: true, ..State::default() })
    }

    /// Listings do not show what is written from now on.
    pub(crate) fn with_stale_listings(inner: Arc<dyn ObjectStore>) -> Arc<FaultStore> {
        FaultStore::with(inner, State { hidden: Some(Vec::new()), ..State::default() })
    }

    /// Listings show what is stored now as 25 hours older than it is.
    pub(crate) fn aged(place: &Place) -> Arc<FaultStore> {
        let aged = place.lens().into_keys().map(|name| place.path(&name)).collect();
        let state = State { aged, ..State::default() };
        FaultStore::with(place.objects(), state)
    }

    pub(crate) fn overwriting(inner: Arc<dyn ObjectStore>) -> Arc<FaultStore> {
        FaultStore::with(inner, State { overwrites: true, ..State::default() })
    }

    pub(crate) fn hooked(
        inner: Arc<dyn ObjectStore>,
        hook: impl Fn(&str, &Path) + Send + Sync + 'static,
    ) -> Arc<FaultStore> {
        let state = State { hook: Some(Hook(Arc::new(hook))), ..State::default() };
        FaultStore::with(inner, state)
    }

    pub(crate) fn open_uploads(&self) -> u64 {
        self.state.lock().unwrap().open_uploads
    }

    fn call_hook(&self, request: &str, path: &Path) {
        let hook = self.state.lock().unwrap().hook.clone();
        hook.iter().for_each(|hook| hook.0(request, path));
    }

    pub(crate) fn upload_requests(&self) -> Vec<u64> {
        self.state.lock().unwrap().upload_requests.clone()
    }

    pub(crate) fn requests(&self) -> u64 {
        self.state.lock().unwrap().requests
    }

    fn next(&self) -> Result<Option<Fault>> {
        self.state.lock().unwrap().next()
    }

    /// As [`next`](FaultStore::next), for a request that may hang.
    async fn begin(&self) -> Result<Option<Fault>> {
        let fault = self.next()?;
        if fault == Some(Fault::Hangs) { hang().await } else { Ok(fault) }
    }

    fn note_written(&self, path: &Path) -> Result<()> {
        let mut state = self.state.lock().unwrap();
        if state.is_full {
            let source = Box::new(std::io::Error::from(std::io::ErrorKind::StorageFull));
            return Err(object_store::Error::Generic { store: "fault", source });
        }
        if let Some(hidden) = &mut state.hidden {
            hidden.push(path.clone());
        }
        Ok(())
    }
}

impl State {
    fn note_upload_request(&mut self) {
        self.upload_requests.push(self.requests);
    }

    fn next(&mut self) -> Result<Option<Fault>> {
        self.requests += 1;
        let n = self.requests;
        if self.every.is_some_and(|every| n.is_multiple_of(every)) {
            return Err(error("slow down"));
        }
        match self.fail_at {
            Some((k, Fault::Refused)) if n == k => Err(error("refused")),
            Some((k, fault)) if n == k => Ok(Some(fault)),
            Some((k, _)) if n > k && self.is_dead_after => Err(error("dead")),
            _ => Ok(None),
        }
    }
}

fn error(message: &str) -> object_store::Error {
    object_store::Error::Generic { store: "fault", source: message.into() }
}

/// The answer to a request that was done.
async fn end<T>(fault: Option<Fault>, result: Result<T>) -> Result<T> {
    match fault {
        None | Some(Fault::Truncated) => result,
        Some(Fault::HangsLater) => hang().await,
        Some(_) => Err(error("answer lost")),
    }
}

/// What is sent of a payload.
fn sent(fault: Option<Fault>, payload: PutPayload) -> PutPayload {
    match fault {
        Some(Fault::HalfDone | Fault::Truncated) => {
            let bytes = Bytes::from(payload);
            PutPayload::from_bytes(bytes.slice(..bytes.len() / 2))
        }
        _ => payload,
    }
}

impl fmt::Display for FaultStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FaultStore({})", self.inner)
    }
}

#[async_trait]
impl ObjectStore for FaultStore {
    async fn put_opts(&self, path: &Path, payload: PutPayload, mut options: PutOptions) -> Result<PutResult> {
        let fault = self.begin().await?;
        if self.state.lock().unwrap().overwrites {
            options.mode = PutMode::Overwrite;
        }
        self.note_written(path)?;
        self.call_hook("put", path);
        end(fault, self.inner.put_opts(path, sent(fault, payload), options).await).await
    }

    async fn put_multipart_opts(&self, path: &Path, options: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        let fault = self.begin().await;
        self.state.lock().unwrap().note_upload_request();
        let fault = fault?;
        self.note_written(path)?;
        let upload = end(fault, self.inner.put_multipart_opts(path, options).await).await?;
        self.state.lock().unwrap().open_uploads += 1;
        Ok(Box::new(FaultUpload { upload, state: Arc::clone(&self.state), path: path.clone() }))
    }

    async fn get_opts(&self, path: &Path, options: GetOptions) -> Result<GetResult> {
        let fault = self.begin().await?;
        let Some(Fault::HalfDone | Fault::Truncated | Fault::HangsLater) = fault.filter(|_| !options.head) else {
            return end(fault, self.inner.get_opts(path, options).await).await;
        };
        let whole = self.inner.get_opts(path, options.clone()).await?.bytes().await?;
        let mut found = self.inner.get_opts(path, options).await?;
        let half = futures_util::stream::iter([Ok(whole.slice(..whole.len() / 2))]);
        let rest = futures_util::stream::iter(fault.filter(|of| *of != Fault::Truncated));
        let rest = rest.then(|fault| end(Some(fault), Ok(Bytes::new())));
        found.payload = GetResultPayload::Stream(half.chain(rest).boxed());
        Ok(found)
    }

    async fn get_ranges(&self, path: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        let fault = self.begin().await?;
        end(fault, self.inner.get_ranges(path, ranges).await).await
    }

    fn delete_stream(&self, paths: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        match self.next() {
            Ok(None) => {
                let hook = self.state.lock().unwrap().hook.clone();
                let call = move |path: &Result<Path>| {
                    hook.iter().for_each(|hook| hook.0("delete", path.as_ref().unwrap()));
                };
                self.inner.delete_stream(paths.inspect(call).boxed())
            }
            Ok(Some(Fault::Hangs)) => futures_util::stream::once(hang()).boxed(),
            Ok(fault) => self.inner.delete_stream(paths).then(move |of| end(fault, of)).boxed(),
            Err(error) => futures_util::stream::iter([Err(error)]).boxed(),
        }
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        prefix.iter().for_each(|prefix| self.call_hook("list", prefix));
        let hidden = self.state.lock().unwrap().hidden.clone().unwrap_or_default();
        let aged = self.state.lock().unwrap().aged.clone();
        let age = move |meta: Result<ObjectMeta>| {
            let mut meta = meta?;
            if aged.contains(&meta.location) {
                meta.last_modified -= Duration::from_secs(25 * 60 * 60);
            }
            Ok(meta)
        };
        match self.next() {
            Ok(None | Some(Fault::Truncated)) => {
                let is_shown = move |meta: &Result<ObjectMeta>| {
                    let is_hidden = meta.as_ref().is_ok_and(|meta| hidden.contains(&meta.location));
                    futures_util::future::ready(!is_hidden)
                };
                self.inner.list(prefix).filter(is_shown).map(age).boxed()
            }
            Ok(Some(Fault::Hangs)) => futures_util::stream::once(hang()).boxed(),
            // The first entry arrives.
            Ok(fault @ Some(Fault::HalfDone | Fault::HangsLater)) => {
                let rest = futures_util::stream::once(async move { end(fault, Err(error("no entry"))).await });
                self.inner.list(prefix).take(1).chain(rest).boxed()
            }
            _ => futures_util::stream::iter([Err(error("listing failed"))]).boxed(),
        }
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let fault = self.begin().await?;
        end(fault, self.inner.list_with_delimiter(prefix).await).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        let fault = self.begin().await?;
        end(fault, self.inner.copy_opts(from, to, options).await).await
    }
}

/// An upload in parts, which are requests too. Lets other requests run between two parts.
#[derive(Debug)]
struct FaultUpload {
    upload: Box<dyn MultipartUpload>,
    state: Arc<Mutex<State>>,
    path: Path,
}

impl FaultUpload {
    fn next(&self) -> Result<Option<Fault>> {
        let mut state = self.state.lock().unwrap();
        let fault = state.next();
        state.note_upload_request();
        fault
    }
}

#[async_trait]
impl MultipartUpload for FaultUpload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        let fault = match self.next() {
            Ok(Some(Fault::Hangs)) => return hang().boxed(),
            Ok(fault) => fault,
            Err(error) => return futures_util::future::ready(Err(error)).boxed(),
        };
        let (hook, path) = (self.state.lock().unwrap().hook.clone(), self.path.clone());
        let part = self.upload.put_part(sent(fault, data));
        async move {
            hook.iter().for_each(|hook| hook.0("part", &path));
            tokio::task::yield_now().await;
            end(fault, part.await).await
        }
        .boxed()
    }

    async fn complete(&mut self) -> Result<PutResult> {
        let fault = self.next()?;
        if fault == Some(Fault::Hangs) {
            return hang().await;
        }
        let completed = end(fault, self.upload.complete().await).await?;
        self.state.lock().unwrap().open_uploads -= 1;
        Ok(completed)
    }

    async fn abort(&mut self) -> Result<()> {
        // Not among the requests of uploads: only those that fail are aborted.
        self.state.lock().unwrap().next()?;
        self.upload.abort().await?;
        self.state.lock().unwrap().open_uploads -= 1;
        Ok(())
    }
}

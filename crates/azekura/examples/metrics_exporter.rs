//! Metrics in the text format of Prometheus, over HTTP, with the standard library only. The example answers one
//! request, which it sends itself, and ends. A production server answers in a loop and limits the time of each
//! connection.
#![expect(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "clippy.toml bans system calls in the engine; an example may use them"
)]

use std::fmt::Write as _;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};

use azekura::{Config, Database, Error, Result};

/// The metrics of a database and its partitions as text.
fn exposition(db: &Database) -> Result<String> {
    let m = db.metrics();
    let mut text = String::new();
    let mut add = |name: &str, kind: &str, help: &str, samples: &[(String, f64)]| {
        let _ = writeln!(text, "# HELP azekura_{name} {help}\n# TYPE azekura_{name} {kind}");
        for (labels, value) in samples {
            let _ = writeln!(text, "azekura_{name}{labels} {value}");
        }
    };
    let one = |value: u64| vec![(String::new(), value as f64)];
    add("commits_total", "counter", "Commits.", &one(m.commits));
    add("conflicts_total", "counter", "Commits with a conflict.", &one(m.conflicts));
    add("exclusive_turns_total", "counter", "Turns in which other commits waited.", &one(m.exclusive_turns));
    add("user_bytes_total", "counter", "Bytes of commits.", &one(m.user_bytes));
    add("wal_syncs_total", "counter", "Syncs of the WAL.", &one(m.wal_syncs));
    add("wal_bytes", "gauge", "Bytes of WAL segments.", &one(m.wal_live_bytes));
    add("memtable_bytes", "gauge", "Bytes of memtables.", &one(m.memtable_bytes));
    add("stall_seconds_total", "counter", "Delays of writers.", &[(String::new(), m.stall_time.as_secs_f64())]);
    add("oldest_snapshot_age", "gauge", "Records since the oldest snapshot.", &one(m.oldest_snapshot_age));
    add("poisoned", "gauge", "1 if writes fail.", &one(m.poisoned.into()));
    let kinds = [("data", m.cache.data), ("index", m.cache.index), ("filter", m.cache.filter), ("blob", m.cache.blob)];
    let hits = kinds.map(|(kind, m)| (format!("{{kind=\"{kind}\"}}"), m.hits as f64));
    add("cache_hits_total", "counter", "Cache hits.", &hits);
    let misses = kinds.map(|(kind, m)| (format!("{{kind=\"{kind}\"}}"), m.misses as f64));
    add("cache_misses_total", "counter", "Cache misses.", &misses);
    let mut disk = Vec::new();
    for name in db.list_partitions() {
        let label = name.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        disk.push((format!("{{partition=\"{label}\"}}"), db.partition(&name)?.disk_space() as f64));
    }
    add("partition_disk_bytes", "gauge", "Bytes on disk.", &disk);
    Ok(text)
}

/// Reads one request up to its empty line, and answers with the metrics.
fn answer(mut stream: TcpStream, db: &Database) -> io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    while lines.next().transpose()?.is_some_and(|line| !line.is_empty()) {}
    let (status, body) = exposition(db).map_or_else(|e| ("500 Error", e.to_string()), |body| ("200 OK", body));
    let length = body.len();
    let head = format!("HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {length}\r\n");
    write!(stream, "{head}Connection: close\r\n\r\n{body}")
}

/// Starts a server for one request, sends the request, and returns the answer.
fn request_metrics(db: &Database) -> io::Result<String> {
    let listener = TcpListener::bind("127.0.0.1:0")?; // a free port
    let address = listener.local_addr()?;
    std::thread::scope(|scope| {
        let server = scope.spawn(|| listener.accept().and_then(|(stream, _)| answer(stream, db)));
        let mut client = TcpStream::connect(address)?;
        client.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")?;
        let mut answer = String::new();
        client.read_to_string(&mut answer)?;
        server.join().expect("the server does not panic")?;
        Ok(answer)
    })
}

fn main() -> Result<()> {
    let path = std::env::temp_dir().join(format!("azekura-metrics-exporter-{}", std::process::id()));
    let db = Config::new(&path).open()?;
    let words = db.open_partition("words", Default::default())?;
    (0..1000u32).try_for_each(|n| words.insert(n.to_be_bytes(), "word"))?;
    let answer = request_metrics(&db).map_err(|error| Error::io("serve", &error))?;
    println!("{answer}");
    assert!(answer.starts_with("HTTP/1.1 200 OK"));
    assert!(answer.contains("\nazekura_commits_total 1000\n"));
    assert!(answer.contains("\nazekura_partition_disk_bytes{partition=\"words\"} "));
    drop(words);
    db.close()?;
    std::fs::remove_dir_all(&path).map_err(|error| Error::io("remove", &error).in_file(&path))
}

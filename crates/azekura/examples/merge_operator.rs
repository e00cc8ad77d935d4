//! Merges: threads count page views and note the last visitors of each page, without reading first. One operator is of
//! this crate, the other one is the program's own.
#![expect(clippy::disallowed_methods, reason = "clippy.toml bans system calls in the engine; an example may use them")]

use std::sync::Arc;
use std::thread;

use azekura::{Config, Database, MergeOperator, Partition, PartitionComponents, Result, merge_operators};

/// Keeps the last `kept` operands, each of which is one byte.
struct Last {
    kept: usize,
}

impl Last {
    fn join(&self, parts: impl Iterator<Item = u8>) -> Vec<u8> {
        let all: Vec<u8> = parts.collect();
        all[all.len().saturating_sub(self.kept)..].to_vec()
    }
}

impl MergeOperator for Last {
    fn name(&self) -> &str {
        "example.last"
    }

    fn full_merge(&self, _key: &[u8], existing: Option<&[u8]>, operands: &[&[u8]]) -> Result<Vec<u8>> {
        Ok(self.join(existing.into_iter().chain(operands.iter().copied()).flatten().copied()))
    }

    fn partial_merge(&self, _key: &[u8], operands: &[&[u8]]) -> Option<Vec<u8>> {
        Some(self.join(operands.iter().copied().flatten().copied()))
    }
}

fn main() -> Result<()> {
    let path = std::env::temp_dir().join(format!("azekura-merge-{}", std::process::id()));
    let db = Config::new(&path).open()?;
    let open = |name, operator| {
        let components = PartitionComponents::default().merge_operator(operator);
        db.open_partition_with(name, Default::default(), components)
    };
    let views = open("views", merge_operators::u64_add())?;
    let visitors = open("visitors", Arc::new(Last { kept: 3 }))?;

    thread::scope(|scope| {
        let visit = |visitor| visit_often(&db, &views, &visitors, visitor);
        let threads: Vec<_> = (b'a'..=b'd').map(|visitor| scope.spawn(move || visit(visitor))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("the thread does not panic"))
    })?;

    views.major_compact()?; // the operands become one value
    let count = views.get("front page")?.expect("it was visited");
    assert_eq!(count, 1000u64.to_le_bytes()[..]);
    let last = visitors.get("front page")?.expect("it was visited");
    println!("1000 views; the last visitors: {}", String::from_utf8_lossy(&last));
    assert_eq!(last.len(), 3);

    drop((views, visitors));
    db.close()?;
    std::fs::remove_dir_all(&path).expect("the directory is removed");
    Ok(())
}

fn visit_often(db: &Database, views: &Partition, visitors: &Partition, visitor: u8) -> Result<()> {
    for _ in 0..250 {
        let mut batch = db.batch();
        batch.merge(views, "front page", 1u64.to_le_bytes());
        batch.merge(visitors, "front page", [visitor]);
        batch.commit()?;
    }
    Ok(())
}

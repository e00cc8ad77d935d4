//! HTML pages: every file below a directory, or generated ones with log-normal sizes, in a random order.
//!
//! The parent packs them into one file, so that its children need not search for tens of thousands of files each.

use crate::error::{Result, wrong};
use crate::measure::disk::files;
use crate::workload::data::{self, Zipfian, below, shuffle};
use rand::rngs::SmallRng;
use rand_distr::{Distribution, LogNormal};
use serde_json::{Map, Value, json};
use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Not every engine takes longer keys.
const KEY_BYTES_MAX: usize = 400;
/// No page is larger than this part of all that is taken.
const PART_MAX: u64 = 32;
const SEED: u64 = 41;

/// Where pages came from, and how many there are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Packed {
    from: &'static str,
    pub(crate) pages: u64,
    pub(crate) bytes: u64,
}

impl Packed {
    /// `pages_from` and the like.
    pub(crate) fn put(&self, answer: &mut Map<String, Value>) {
        answer.insert("pages_from".into(), json!(self.from));
        answer.insert("pages".into(), json!(self.pages));
        answer.insert("page_bytes".into(), json!(self.bytes));
        answer.insert("mean_page_bytes".into(), json!(self.bytes as f64 / self.pages.max(1) as f64));
    }
}

/// Which pages are wanted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    /// No smaller pages.
    pub(crate) least_bytes: u64,
    /// As many pages as have this many bytes together.
    pub(crate) total_bytes: u64,
    /// Most pages.
    pub(crate) pages: u64,
}

/// Writes pages from below `asked` into the file `to`; without it from the documentation of the Rust toolchain, or
/// generated ones if there is none.
///
/// # Errors
/// There are no pages in the directory that was asked for; those of reading and writing.
pub(crate) fn pack(asked: Option<&Path>, wanted: Wanted, to: &Path) -> Result<Packed> {
    let found = match asked {
        Some(dir) => from_files(dir, wanted, to)?,
        None => documentation().map(|dir| from_files(&dir, wanted, to)).transpose()?.unwrap_or_default(),
    };
    match (found, asked) {
        ((0, _), Some(dir)) => Err(format!("there are no HTML pages below {}", dir.display()).into()),
        ((0, _), None) => {
            let (pages, bytes) = generated(wanted, to)?;
            Ok(Packed { from: "generated", pages, bytes })
        }
        ((pages, bytes), _) => Ok(Packed { from: "files", pages, bytes }),
    }
}

/// Where the toolchain has its documentation, if it has any.
fn documentation() -> Option<PathBuf> {
    let told = Command::new("rustc").args(["--print", "sysroot"]).output().ok().filter(|told| told.status.success())?;
    let dir = Path::new(String::from_utf8(told.stdout).ok()?.trim()).join("share/doc");
    dir.is_dir().then_some(dir)
}

fn from_files(dir: &Path, wanted: Wanted, to: &Path) -> Result<(u64, u64)> {
    std::fs::read_dir(dir)?; // a missing directory is an error
    let is_html = |path: &Path| path.extension().is_some_and(|end| end == "html" || end == "htm");
    let found = files(dir).filter(|(path, _)| is_html(path));
    let mut found: Vec<(PathBuf, u64)> = found.map(|(path, metadata)| (path, metadata.len())).collect();
    shuffle(&mut found, SEED);
    let most = wanted.total_bytes / PART_MAX;
    let mut packer = Packer::new(wanted, to)?;
    for (path, len) in found.iter().filter(|(_, len)| (wanted.least_bytes.max(1)..=most).contains(len)) {
        let key = path.strip_prefix(dir)?.as_os_str().as_bytes();
        if packer.is_full() {
            break;
        }
        if key.len() <= KEY_BYTES_MAX {
            let page = std::fs::read(path)?;
            if page.len() as u64 != *len {
                return Err(format!("{} is being changed", path.display()).into());
            }
            packer.add(key, &page)?;
        }
    }
    packer.finish()
}

fn generated(wanted: Wanted, to: &Path) -> Result<(u64, u64)> {
    let (mut generator, mut packer) = (Generator::new(SEED), Packer::new(wanted, to)?);
    let mut number = 0u64;
    while !packer.is_full() {
        let page = generator.page();
        number += 1;
        if page.len() as u64 >= wanted.least_bytes {
            packer.add(format!("site/{:02x}/page{number}.html", number % 251).as_bytes(), page.as_bytes())?;
        }
    }
    packer.finish()
}

/// Writes pages one after the other, each with the lengths of key and page before it.
struct Packer {
    file: BufWriter<File>,
    wanted: Wanted,
    pages: u64,
    bytes: u64,
}

impl Packer {
    fn new(wanted: Wanted, to: &Path) -> Result<Packer> {
        Ok(Packer { file: BufWriter::new(File::create(to)?), wanted, pages: 0, bytes: 0 })
    }

    fn is_full(&self) -> bool {
        self.bytes >= self.wanted.total_bytes || self.pages >= self.wanted.pages
    }

    fn add(&mut self, key: &[u8], page: &[u8]) -> Result<()> {
        for len in [key.len(), page.len()] {
            self.file.write_all(&u32::try_from(len)?.to_le_bytes())?;
        }
        self.file.write_all(key)?;
        self.file.write_all(page)?;
        (self.pages, self.bytes) = (self.pages + 1, self.bytes + page.len() as u64);
        Ok(())
    }

    fn finish(mut self) -> Result<(u64, u64)> {
        self.file.flush()?;
        Ok((self.pages, self.bytes))
    }
}

/// Packed pages, in memory. Immutable.
pub(crate) struct Pages {
    packed: Vec<u8>,
    /// Of key and page.
    places: Vec<(Range<usize>, Range<usize>)>,
}

impl Pages {
    /// Those that were packed into a file, at least one.
    pub(crate) fn read(path: &Path) -> Result<Pages> {
        let packed = std::fs::read(path)?;
        let (mut places, mut at) = (Vec::new(), 0);
        while at < packed.len() {
            let len = |at: usize| -> Result<usize> {
                let bytes = packed.get(at..at + 4).ok_or("the packed pages end within a length")?;
                Ok(u32::from_le_bytes(bytes.try_into()?) as usize)
            };
            let (key, page) = (at + 8..at + 8 + len(at)?, len(at + 4)?);
            let page = key.end..key.end + page;
            at = page.end;
            places.push((key, page));
        }
        if at != packed.len() || places.is_empty() {
            return Err("the packed pages do not end with a page".into());
        }
        Ok(Pages { packed, places })
    }

    /// How many there are; from that index on they come again, with another key and a comment in front.
    pub(crate) fn count(&self) -> u64 {
        self.places.len() as u64
    }

    fn place(&self, index: u64) -> (&[u8], &[u8], u64) {
        let (key, page) = &self.places[(index % self.count()) as usize];
        (&self.packed[key.clone()], &self.packed[page.clone()], index / self.count())
    }

    /// Writes the key of the page at `index` over `out`.
    pub(crate) fn key(&self, index: u64, out: &mut Vec<u8>) {
        let (key, _, copy) = self.place(index);
        out.clear();
        out.extend_from_slice(key);
        if copy > 0 {
            out.extend_from_slice(format!("?copy={copy}").as_bytes());
        }
    }

    /// Writes the page at `index` in that version over `out`: as it is in version 0 of its first copy, else with a
    /// comment in front.
    pub(crate) fn page(&self, index: u64, version: u64, out: &mut Vec<u8>) {
        let (_, page, copy) = self.place(index);
        out.clear();
        out.extend_from_slice(comment(version, copy).as_bytes());
        out.extend_from_slice(page);
    }

    /// That `found` is that page, to the last byte.
    ///
    /// # Errors
    /// It is not.
    pub(crate) fn check(&self, index: u64, version: u64, found: &[u8]) -> Result<()> {
        let (_, page, copy) = self.place(index);
        match found.strip_prefix(comment(version, copy).as_bytes()) == Some(page) {
            true => Ok(()),
            false => Err(wrong(format!("page {index} in version {version} came back as something else"))),
        }
    }
}

fn comment(version: u64, copy: u64) -> String {
    if (version, copy) == (0, 0) { String::new() } else { format!("<!-- version {version} of copy {copy} -->\n") }
}

/// Half of all pages are smaller.
const MEDIAN_BYTES: f64 = 4300.0;
/// The standard deviation of the logarithm of a size.
const SPREAD: f64 = 1.3;
const LEAST_BYTES: f64 = 300.0;
const MOST_BYTES: f64 = (4 << 20) as f64;
const WORDS: u64 = 6000;
const SYLLABLES: [&str; 24] = [
    "ar", "be", "con", "de", "en", "fi", "ga", "hi", "in", "ju", "ka", "le", "men", "no", "or", "per", "qui", "re",
    "st", "ti", "un", "ver", "wa", "zo",
];

/// Makes pages, one after the other. The same seed gives the same ones.
pub(crate) struct Generator {
    rng: SmallRng,
    words: Vec<String>,
    choice: Zipfian,
}

impl Generator {
    pub(crate) fn new(seed: u64) -> Generator {
        let mut rng = data::rng(seed);
        let word = |rng: &mut SmallRng| {
            let syllables = 1 + below(rng, 4);
            (0..syllables).map(|_| SYLLABLES[below(rng, SYLLABLES.len() as u64) as usize]).collect()
        };
        let words = (0..WORDS).map(|_| word(&mut rng)).collect();
        Generator { rng, words, choice: Zipfian::new(WORDS) }
    }

    /// A size with a logarithm that is normally distributed.
    fn size(&mut self) -> usize {
        let law = LogNormal::new(MEDIAN_BYTES.ln(), SPREAD).expect("the spread is finite");
        law.sample(&mut self.rng).clamp(LEAST_BYTES, MOST_BYTES) as usize
    }

    /// The next page: a heading, then paragraphs of zipfian words, links and declarations until it has its size.
    pub(crate) fn page(&mut self) -> String {
        let size = self.size();
        let mut page = String::from("<!DOCTYPE html><html lang=\"en\"><head><meta charset=\"utf-8\"></head><body>\n");
        while page.len() < size {
            let kind = below(&mut self.rng, 4);
            page.push_str(["<ul class=\"item-table\">", "<pre class=\"rust item-decl\">", "<p>", "<p>"][kind as usize]);
            for _ in 0..10 + below(&mut self.rng, 30) {
                let [one, other] = [(); 2].map(|()| &self.words[self.choice.rank(&mut self.rng) as usize]);
                let _ = match kind {
                    0 => write!(page, "<li><a class=\"struct\" href=\"../{one}/struct.{other}.html\">{other}</a></li>"),
                    1 => writeln!(page, "    pub {one}: {other}&lt;u64, {}&gt;,", below(&mut self.rng, 100_000)),
                    _ => write!(page, "{one} {other} "),
                }; // writing to a string cannot fail
            }
            page.push_str(["</ul>\n", "</pre>\n", ".</p>\n", ".</p>\n"][kind as usize]);
        }
        page.push_str("</body></html>\n");
        page
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::{Generator, MEDIAN_BYTES, Packed, Pages, Wanted, pack};
    use crate::error::{ErrorKind, KnownError};
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::{Path, PathBuf};

    const ALL: Wanted = Wanted { least_bytes: 0, total_bytes: 1 << 20, pages: u64::MAX };

    /// A few hundred generated pages of at least 1 KiB, in the file that is given.
    pub(crate) fn small_pack(dir: &Path) -> PathBuf {
        let to = dir.join("pages");
        super::generated(Wanted { least_bytes: 1024, total_bytes: 600_000, pages: 60 }, &to).unwrap();
        to
    }

    #[test]
    fn every_html_file_below_a_directory_is_taken_once() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("in/below")).unwrap();
        for (name, text) in [("a.html", "one"), ("below/b.htm", "two"), ("below/c.css", "no"), ("empty.html", "")] {
            fs::write(dir.path().join("in").join(name), text).unwrap();
        }
        let to = dir.path().join("pages");
        let packed = pack(Some(&dir.path().join("in")), ALL, &to).unwrap();
        assert_eq!(packed, Packed { from: "files", pages: 2, bytes: 6 });
        let pages = Pages::read(&to).unwrap();
        let mut all = Vec::new();
        for index in 0..4 {
            let (mut key, mut page) = (Vec::new(), Vec::new());
            pages.key(index, &mut key);
            pages.page(index, 0, &mut page);
            pages.check(index, 0, &page).unwrap();
            all.push((String::from_utf8(key).unwrap(), String::from_utf8(page).unwrap()));
        }
        all.sort();
        let comment = "<!-- version 0 of copy 1 -->\n";
        let expected =
            [("a.html", "one"), ("a.html?copy=1", "one"), ("below/b.htm", "two"), ("below/b.htm?copy=1", "two")];
        for ((key, page), (name, text)) in all.iter().zip(expected) {
            let front = if name.contains('?') { comment } else { "" };
            assert_eq!((key.as_str(), page.as_str()), (name, format!("{front}{text}").as_str()));
        }
        assert!(pack(Some(&dir.path().join("in/none")), ALL, &to).is_err());
        fs::create_dir(dir.path().join("void")).unwrap();
        let error = pack(Some(&dir.path().join("void")), ALL, &to).unwrap_err().to_string();
        assert!(error.contains("no HTML pages"), "{error}");
    }

    #[test]
    fn as_many_pages_as_wanted_are_generated_and_small_ones_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let pages = Pages::read(&small_pack(dir.path())).unwrap();
        assert!((20..=60).contains(&pages.count()), "{}", pages.count());
        let (mut page, mut other) = (Vec::new(), Vec::new());
        for index in 0..pages.count() {
            pages.page(index, 0, &mut page);
            assert!(page.len() >= 1024);
        }
        pages.page(7, 1, &mut page);
        pages.page(7, 2, &mut other);
        assert!(page != other && page.len() == other.len());
        pages.check(7, 2, &other).unwrap();
        *other.last_mut().unwrap() ^= 1;
        for (index, version, found) in [(7, 2, &page), (8, 1, &page), (7, 2, &other)] {
            let error = pages.check(index, version, found).unwrap_err();
            assert_eq!(KnownError::of(&error).kind, ErrorKind::Wrong);
        }
    }

    #[test]
    fn a_broken_pack_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let to = small_pack(dir.path());
        let whole = fs::read(&to).unwrap();
        for len in [0, 3, 7, whole.len() - 1] {
            fs::write(&to, &whole[..len]).unwrap();
            assert!(Pages::read(&to).is_err(), "{len}");
        }
    }

    #[test]
    fn pages_follow_from_the_seed_and_differ() {
        let pages = |seed| {
            let mut generator = Generator::new(seed);
            (0..300).map(|_| generator.page()).collect::<Vec<_>>()
        };
        let all = pages(1);
        assert_eq!(all, pages(1));
        assert_ne!(all[0], pages(2)[0]);
        assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), 300);
        assert!(all.iter().all(|page| page.starts_with("<!DOCTYPE html>") && page.ends_with("</html>\n")));
    }

    #[test]
    fn sizes_are_log_normal() {
        let mut generator = Generator::new(3);
        let mut sizes: Vec<f64> = (0..1001).map(|_| generator.page().len() as f64).collect();
        sizes.sort_by(f64::total_cmp);
        assert!((0.8..1.3).contains(&(sizes[500] / MEDIAN_BYTES)), "{}", sizes[500]);
        let (low, high) = ((sizes[500] / sizes[159]).ln(), (sizes[841] / sizes[500]).ln());
        assert!((0.9..1.6).contains(&low) && (1.0..1.6).contains(&high), "one deviation: {low} below, {high} above");
    }
}

//! Reports in a real browser: they are laid out, in the light and in the dark, on a desk and on a
//! phone, without a message on the console and without a request.

mod devtools;

use crate::report::{HOSTILE, entry, page_of_log, with_words};
use crate::{source_tree, write};
use devtools::Browser;
use flashtune::device::Arch;
use flashtune::plan::shipped;
use serde_json::Value;

/// Entries of records of all kinds, some with hostile words.
fn entries() -> Vec<Value> {
    let records = shipped::records(Arch::Sm(9, 0)).into_iter().step_by(60);
    let of_records = records.map(|record| entry(&serde_json::to_value(record).unwrap()));
    of_records.chain(HOSTILE.iter().map(|word| with_words(word))).collect()
}

/// What the browser complains of: console messages, exceptions, entries of its log, dialogs.
fn complaints(events: &[Value]) -> Vec<&Value> {
    let is_complaint = |event: &&Value| {
        let method = event["method"].as_str().unwrap_or_default();
        ["Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded", "Page.javascriptDialogOpening"]
            .contains(&method)
    };
    events.iter().filter(is_complaint).collect()
}

/// The addresses that were asked for.
fn requests(events: &[Value]) -> Vec<&str> {
    let sent = events.iter().filter(|event| event["method"] == "Network.requestWillBeSent");
    sent.filter_map(|event| event["params"]["request"]["url"].as_str()).collect()
}

/// Elements without a size, and text or bars that leave the screen.
const FAULTS: &str = r#"(() => {
    const faults = [];
    const visible = 'h1, h2, h3, p, dt, dd, a, th, td, figure, figcaption, section, summary, svg, svg rect, svg text, footer';
    const open = element => !element.closest('details') || element.matches('summary');
    for (const element of [...document.querySelectorAll(visible)].filter(open)) {
        const box = element.getBoundingClientRect();
        const isEmpty = !element.matches('svg *') && element.textContent.trim() === '';
        if (!isEmpty && (box.width <= 0 || box.height <= 0)) faults.push('no size: ' + element.outerHTML.slice(0, 200));
        const scrolls = element.closest('.scroll') || element.closest('svg svg');
        if (!scrolls && box.right > innerWidth + 1) faults.push('too wide: ' + element.outerHTML.slice(0, 200));
    }
    if (document.documentElement.scrollWidth > innerWidth) faults.push('the page scrolls sideways');
    return faults;
})()"#;

#[test]
fn a_browser_lays_reports_out_without_complaints_and_without_requests() {
    let Some(program) = devtools::program() else { return };
    let folder = tempfile::tempdir().unwrap();
    let page = page_of_log(folder.path(), &entries());
    let address = format!("file://{}", page.display());
    let mut browser = Browser::start(&program);
    let mut grounds = Vec::new();
    for (width, height, scheme) in [(1000, 800, "light"), (1000, 800, "dark"), (360, 740, "light"), (320, 568, "dark")]
    {
        browser.show(&page, width, height, scheme);
        let faults = browser.evaluate(FAULTS);
        assert_eq!(faults, Value::Array(Vec::new()), "{width} x {height}, {scheme}");
        let count = |browser: &mut Browser, what: &str| {
            browser.evaluate(&format!("document.querySelectorAll({what:?}).length")).as_u64().unwrap()
        };
        assert_eq!(count(&mut browser, "section.problem") as usize, entries().len());
        assert_eq!(count(&mut browser, "svg.candidates rect.winner") as usize, entries().len());
        assert_eq!(count(&mut browser, "svg.candidates rect.default") as usize, entries().len());
        assert_eq!(count(&mut browser, "script, img, iframe, object, embed, [onload], [onerror]"), 0);
        let ground = "getComputedStyle(document.body).backgroundColor";
        grounds.push(browser.evaluate(ground).as_str().unwrap().to_owned());
        // A bar is as long as its time: the default's is 1.25 times the winner's.
        let ratio = "(() => { const of = kind => document.querySelector('svg.candidates rect.' + kind)\
                     .getBoundingClientRect().width; return of('default') / of('winner'); })()";
        let ratio = browser.evaluate(ratio).as_f64().unwrap();
        assert!((ratio - 1.25).abs() < 0.02, "{ratio}");
        let events = browser.take_events();
        assert!(complaints(&events).is_empty(), "{:?}", complaints(&events));
        let asked: Vec<&str> = requests(&events).into_iter().filter(|url| !url.starts_with("data:")).collect();
        assert_eq!(asked, [&address], "the page alone is read");
    }
    assert_eq!((&grounds[0], &grounds[1]), (&grounds[2], &grounds[3]));
    assert_ne!(grounds[0], grounds[1], "the dark page is dark");

    // The complaints would be seen, and the page's policy refuses what a mistake would let in.
    let inject = "(async () => { for (const html of ['<img src=\"http://127.0.0.1:9/\">', '<iframe src=\"http://127.0.0.1:9/\">']) \
                  document.body.append(document.createRange().createContextualFragment(html)); \
                  const script = document.createElement('script'); script.textContent = 'document.title = \"owned\"'; \
                  document.body.append(script); await new Promise(done => setTimeout(done, 200)); return document.title; })()";
    assert_ne!(browser.evaluate(inject), "owned");
    let events = browser.take_events();
    let refused =
        complaints(&events).iter().filter(|event| event.to_string().contains("Content Security Policy")).count();
    assert!(refused >= 3, "{events:?}");
}

#[test]
fn each_table_has_headers_and_each_chart_has_words() {
    let Some(program) = devtools::program() else { return };
    let folder = tempfile::tempdir().unwrap();
    let page = page_of_log(folder.path(), &entries());
    let mut browser = Browser::start(&program);
    browser.show(&page, 1000, 800, "light");
    let faults = browser.evaluate(
        r#"(() => {
        const faults = [], ids = new Set();
        for (const element of document.querySelectorAll('[id]'))
            ids.has(element.id) ? faults.push('twice: ' + element.id) : ids.add(element.id);
        for (const table of document.querySelectorAll('table')) {
            const heads = table.querySelectorAll('thead th[scope=col]').length;
            for (const row of table.querySelectorAll('tbody tr'))
                if ([...row.cells].reduce((sum, cell) => sum + cell.colSpan, 0) !== heads) faults.push(row.outerHTML);
        }
        for (const chart of document.querySelectorAll('svg[role=img]'))
            for (const id of chart.getAttribute('aria-labelledby').split(' '))
                if (!document.getElementById(id)?.textContent.trim()) faults.push('no words: ' + id);
        for (const link of document.querySelectorAll('a'))
            if (!document.querySelector(link.getAttribute('href'))) faults.push('leads nowhere: ' + link.href);
        return faults;
    })()"#,
    );
    assert_eq!(faults, Value::Array(Vec::new()));
}

/// The problems of the documents' picture.
const PICTURED: [&str; 4] = [
    "v1 forward bf16 d64 dv64 full nodropout vec8 page16 gqa8 b8 hq64 sq1 sk32768",
    "v1 forward bf16 d64 dv64 full nodropout vec8 gqa1 b1 hq32 sq16384 sk16384",
    "v1 forward bf16 d128 dv128 causal nodropout vec8 gqa4 b1 hq32 sq16 sk4096",
    "v1 backward bf16 d128 dv128 causal nodropout vec8 gqa4 b1 hq32 sq8192 sk8192",
];

/// Writes the documents' pictures: of shipped records, and of one problem of a log.
#[test]
#[ignore = "FLASHTUNE_REPORT_LOG=log.jsonl cargo test --test cli -- --ignored pictures"]
fn pictures() {
    let program = devtools::program().expect("chromium");
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("page.html");
    let mut browser = Browser::start(&program);
    let mut picture = |name: &str, args: &[&str], first: &str, last: &str| {
        let output = crate::run(folder.path(), &[&["report", "--output", page.to_str().unwrap()], args].concat());
        assert!(output.status.success(), "{output:?}");
        browser.show(&page, 900, 1200, "light");
        let of = |element: &str| format!("document.querySelector({element:?}).getBoundingClientRect()");
        let places = format!("[{}.top - 16, {}.bottom + 16]", of(first), of(last));
        let places = browser.evaluate(&places);
        let (top, bottom) = (places[0].as_f64().unwrap().max(0.0), places[1].as_f64().unwrap());
        let png = browser.picture(900.0, top, bottom - top);
        assert!((20_000..200_000).contains(&png.len()), "{} bytes", png.len());
        std::fs::write(source_tree::root().join("docs").join(name), png).unwrap();
    };
    let lines = crate::h200_records().into_iter().filter(|record| PICTURED.contains(&record.key.as_str()));
    let records =
        write(folder.path(), "records.jsonl", &flashtune::plan::record::write_lines(lines.collect()).unwrap());
    picture("report.png", &[records.to_str().unwrap()], "h1", "#d1p1");
    let log = std::env::var("FLASHTUNE_REPORT_LOG").expect("FLASHTUNE_REPORT_LOG names a log of autotune");
    picture("report-candidates.png", &["--log", &log], "#d1p1", "#d1p1");
}

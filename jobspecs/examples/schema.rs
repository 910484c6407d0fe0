//! Writes `jobspecs/schema/job.schema.json` from the types: `cargo run -p volley-jobspecs --example schema`.

use std::path::Path;

fn main() -> std::io::Result<()> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("schema/job.schema.json");
    std::fs::write(&path, volley_jobspecs::schema::job_schema_text())?;
    println!("wrote {}", path.display());
    Ok(())
}

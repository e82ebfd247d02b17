// What the page at the root does in a browser, on a screen of 420 pixels.
//
//     node page.mjs ADDRESS BROWSER PLAYWRIGHT
//
// It prints "end it", and then reads a line, when the instance at ADDRESS is to be ended.

import assert from "node:assert/strict";
import { once } from "node:events";
import { createRequire } from "node:module";

const [address, executablePath, playwright] = process.argv.slice(2);
const { chromium } = createRequire(import.meta.url)(playwright);
const WIDTH = 420;

const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-background-networking"] });
try {
    const context = await browser.newContext({ viewport: { width: WIDTH, height: 900 } });
    await everything(await context.newPage());
} finally {
    await browser.close();
}

async function everything(page) {
    const errors = [];
    page.on("pageerror", error => errors.push(error.message));
    // Such as requests to other hosts. A refusal is logged, too, and is meant.
    page.on("console", message => {
        const isRefusal = /the server responded with a status of (409|429|503)/.test(message.text());
        if (message.type() === "error" && !isRefusal) errors.push(message.text());
    });
    page.setDefaultTimeout(30_000);

    await page.goto(`http://${address}/`);
    await page.locator("#health.free", { hasText: "Read at" }).waitFor();
    await shows(page, "#locks", "Nobody holds a lock.");
    await shows(page, "#throttles", "due");
    await shows(page, "#services", "0 of 4 slots taken");
    await fits(page);

    // Each button, and what is said of its responses.
    await press(page, "book", "Book", "1 × 201");
    await press(page, "book", "Book ten times at once", "1 × 201 9 × 409");
    await press(page, "report", "Write it three times at once", "1 × 201 2 × 409", async () => {
        await shows(page, "#locks", "nightly report");
        await shows(page, "#locks", "the instance");
    });
    await shows(page, "#responses", "by the instance");
    await press(page, "rebuild", "Rebuild", "1 × 202");
    await press(page, "rebuild", "Rebuild five times at once", "5 × 429");
    await shows(page, "#throttles", "last by the instance");
    await press(page, "geocode", "Geocode", "1 × 200");
    await press(page, "geocode", "Geocode twelve at once", "4 × 200 8 × 503", () => shows(page, "#services", "4 of 4 slots taken"));
    await shows(page, "#responses", "Retry-After: ");
    await shows(page, "#services", "0 of 4 slots taken");
    assert.equal(await page.locator("#responses li").count(), 1 + 10 + 3 + 1 + 5 + 1 + 12);

    // The limit of another client, whose quota an operator has set.
    await page.getByLabel("API key").fill("small");
    await shows(page, "#limit", "2 of 2 left");
    await press(page, "book", "Book ten times at once", /(1 × 201 1 × 409|2 × 409) 8 × 429/);
    await shows(page, "#limit", "limited");

    // What others do is seen without a click.
    const elsewhere = fetch(`http://${address}/reports/nightly`, { method: "POST" });
    await shows(page, "#locks", "nightly report");
    assert.equal((await elsewhere).status, 201);
    await shows(page, "#locks", "Nobody holds a lock.");

    // A name is text, whatever is in it.
    await page.getByLabel("API key").fill("<b>bold</b>");
    await shows(page, "#limit", "<b>bold</b>");
    await fits(page);

    // A call that takes too long, as it times out.
    await press(page, "geocode", "Make one slow call", "1 × 504", () => shows(page, "#services", "1 of 4 slots taken"));
    await shows(page, "#timed_out", "the instance");

    // The pages of the operators.
    for (const path of ["/admin/locks", "/admin/limits"]) {
        const operators = await page.context().newPage();
        await operators.goto(`http://${address}${path}`);
        await fits(operators);
        await operators.close();
    }

    const before = errors.splice(0).filter(error => !/status of 504/.test(error));
    assert.deepEqual(before, []);

    process.stdout.write("end it\n");
    await once(process.stdin, "data");
    process.stdin.pause();
    await page.locator("#health.bad", { hasText: "This instance does not reply. What is below was read" }).waitFor();
    await press(page, "report", "Write the report", "1 × none");
    await shows(page, "#responses", "no response");
    await fits(page);
    const after = errors.filter(error => !/ERR_CONNECTION_REFUSED|ERR_EMPTY_RESPONSE|ERR_CONNECTION_RESET|status of 504/.test(error));
    assert.deepEqual(after, []);
}

/** Presses a button of a form, looks meanwhile, and waits for what is said of the responses. */
async function press(page, form, button, responses, meanwhile) {
    await page.locator(`#${form}`).getByRole("button", { name: button, exact: true }).click();
    await meanwhile?.();
    const output = page.locator(`#${form} output`);
    await output.filter({ hasText: "Responses: " }).waitFor();
    const said = (await output.innerText()).replace(/\s+/g, " ").trim();
    if (responses instanceof RegExp) assert.match(said, responses, button);
    else assert.equal(said, `Responses: ${responses}`, button);
}

async function shows(page, where, text) {
    await page.locator(where).filter({ hasText: text }).waitFor();
}

async function fits(page) {
    const width = await page.evaluate(() => document.documentElement.scrollWidth);
    assert.ok(width <= WIDTH, `the page is ${width} pixels wide`);
}

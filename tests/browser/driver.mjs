// Opens UI workflows in ComfyUI's own frontend, in one page of headless Chromium.
//
//   node driver.mjs CHROMIUM
//
// Each line of standard input is a request, one JSON object with the options that tests/browser_session.py
// writes; each line of standard output answers one. The driver ends with its input, and after a request that
// failed ({"failure": text}) or took too long ({"timeout": what it was doing}). The answer:
//
//   frontend            the frontend's version
//   nodeTypes           the type of each node, subgraphs included
//   missingNodeTypes    types that no pack registered
//   validationErrors    what the frontend's own workflow schema objects to
//   toasts              messages that the page showed
//   dialogs             the text of each dialog that came up, as the one about missing models; they are closed
//   consoleErrors       console errors and uncaught exceptions since the workflow was loaded
//   startupErrors       those from before, the stock frontend's own among them
//   failedRequests      ["STATUS URL"] of answers from 400 on
//   apiPrompt           the graph as the frontend would queue it
//   screenshots         files written
//   run                 null, or
//     outcome           "success" | "error" | "interrupted" | "refused"
//     promptId, error   of the prompt; `error` is ComfyUI's own record of it
//     seconds           from the press of Run to the end
//     cancelSeconds     from the press of Cancel to the end, or null
//     progress          [{node, value, max, ms}]
//     previews          how many preview images arrived
//     previewShown      whether the page held a preview for a node while the prompt ran
//     titles            the distinct titles of the page
//     images            [{node, type, width, height}] that the nodes show in the end, loaded
//     watched           name -> distinct values
//   evaluated           name -> value

import { createInterface } from 'node:readline'
import { chromium } from 'playwright-core'

const browser = await chromium.launch({
  executablePath: process.argv[2],
  headless: true,
  timeout: 60000,
  args: [
    '--no-sandbox',
    '--disable-gpu',
    '--disable-quic',
    '--disable-dev-shm-usage',
    '--no-first-run',
    '--no-proxy-server',
    '--disable-background-networking',
    '--disable-component-update',
    '--disable-sync'
  ]
})

let deadline = 0
const remaining = () => Math.max(1, deadline - Date.now())
let doing = 'nothing'
let started = false
let startupErrors = []
let consoleErrors = []
let failedRequests = []

const context = await browser.newContext({ viewport: { width: 1600, height: 1000 }, locale: 'en-US' })
// The banner that invites to newer nodes would stand in every screenshot.
await context.addInitScript(() => window.localStorage.setItem('vueNodesBannerDismissed', 'true'))
const page = await context.newPage()
page.on('console', (message) => {
  if (message.type() === 'error') note(message.text())
})
page.on('pageerror', (error) => note(String(error.stack ?? error)))
page.on('response', (response) => {
  if (response.status() >= 400) failedRequests.push(`${response.status()} ${response.url()}`)
})

for await (const line of createInterface({ input: process.stdin })) {
  const answer = await answerRequest(JSON.parse(line))
  console.log(JSON.stringify(answer))
  if (answer.failure || answer.timeout) break
}
await browser.close()

async function answerRequest(options) {
  deadline = Date.now() + options.timeoutMs
  let timer
  const timeout = new Promise((resolve) => {
    timer = setTimeout(() => resolve({ timeout: doing }), options.timeoutMs)
  })
  try {
    return await Promise.race([openWorkflow(options), timeout])
  } catch (error) {
    if (remaining() <= 1) return { timeout: doing }
    return { failure: `while ${doing}: ${error.stack ?? error}` }
  } finally {
    clearTimeout(timer)
  }
}

function note(text) {
  // Failed requests are listed apart; what the policy blocks are the frontend's calls to the outside.
  if (/^Failed to load resource/.test(text) || /Content Security Policy/.test(text)) return
  ;(started ? consoleErrors : startupErrors).push(text)
}

async function openFrontend(options) {
  doing = 'storing the settings'
  await storeSettings(options.url, {
    'Comfy.TutorialCompleted': true,
    'Comfy.Validation.Workflows': true,
    'Comfy.Workflow.Persist': false,
    'Comfy.Window.UnloadConfirmation': false,
    'Comfy.Locale': options.locale,
    // The renderer, whatever a frontend's own choice is.
    'Comfy.VueNodes.Enabled': false,
    ...options.settings
  })
  started = false
  startupErrors = []
  failedRequests = []
  doing = 'waiting for the frontend'
  await page.goto(options.url, { timeout: remaining(), waitUntil: 'domcontentloaded' })
  await page.waitForFunction(
    () =>
      window.app?.graph &&
      window.app.extensionManager &&
      Object.keys(LiteGraph.registered_node_types).length > 50,
    null,
    { timeout: remaining() }
  )
  await page.evaluate(recordToasts)
}

async function openWorkflow(options) {
  page.setDefaultTimeout(remaining())
  if (options.fresh || !page.url().startsWith(options.url)) await openFrontend(options)
  started = true
  doing = 'loading the workflow'
  consoleErrors = []
  await dismissMessages()
  await page.evaluate(() => (window.tpToasts = []))
  await page.evaluate(
    ([workflow, name]) => window.app.loadGraphData(workflow, true, true, name),
    [options.workflow, options.name]
  )
  await page.waitForTimeout(500)
  const loaded = await page.evaluate(describeGraph)
  const dialogs = await page.evaluate(() =>
    [...document.querySelectorAll('.p-dialog')].map((element) => element.innerText.trim())
  )
  await dismissMessages()

  doing = 'converting the workflow'
  let apiPrompt = null
  let conversionError = null
  try {
    apiPrompt = await page.evaluate(async () => (await window.app.graphToPrompt()).output)
  } catch (error) {
    conversionError = String(error)
  }
  const screenshots = [options.screenshot]
  await page.screenshot({ path: options.screenshot, timeout: remaining() })

  let run = null
  if (options.run) {
    run = await runWorkflow(options)
    screenshots.push(options.runScreenshot)
    await page.screenshot({ path: options.runScreenshot, timeout: remaining() })
  }

  doing = 'evaluating expressions'
  const evaluated = {}
  for (const [name, expression] of Object.entries(options.evaluate)) {
    evaluated[name] = await page.evaluate(expression)
  }
  const toasts = await page.evaluate(() => window.tpToasts)
  return {
    frontend: await page.evaluate(() => window.__COMFYUI_FRONTEND_VERSION__ ?? null),
    ...loaded,
    validationErrors: toasts.filter((text) => /validation error/i.test(text)),
    conversionError,
    toasts,
    dialogs,
    consoleErrors,
    startupErrors,
    failedRequests,
    apiPrompt,
    screenshots,
    run,
    evaluated
  }
}

async function dismissMessages() {
  doing = 'closing messages and dialogs'
  await page.waitForFunction(
    () => {
      const buttons = document.querySelectorAll('.p-toast-close-button, .p-dialog-close-button')
      for (const button of buttons) button.click()
      return !document.querySelector('.p-toast-message, .p-dialog')
    },
    null,
    { timeout: Math.min(remaining(), 10000), polling: 100 }
  )
}

async function storeSettings(url, settings) {
  const response = await fetch(`${url}/settings`, {
    method: 'POST',
    headers: { 'Content-Type': 'application/json' },
    body: JSON.stringify(settings),
    signal: AbortSignal.timeout(remaining())
  })
  if (!response.ok) throw new Error(`storing the settings was answered with HTTP ${response.status}`)
}

async function runWorkflow(options) {
  doing = 'waiting for the Run button'
  await page.evaluate(recordRun)
  const button = page.locator('[data-testid="queue-button"]')
  await button.locator('button').or(button).first().click({ timeout: remaining() })
  const watching = watchUntilEnd(options.watch)

  let cancelledAt = null
  if (options.cancelAtProgress !== null || options.cancelAfterMs !== null) {
    doing = 'waiting for the moment to cancel'
    await page.waitForFunction(
      ([value, node, ms]) => {
        const run = window.tpRun
        return (
          run.outcome ||
          (value !== null &&
            run.progress.some((entry) => entry.value >= value && (node === null || entry.node === node))) ||
          (ms !== null && performance.now() - run.started >= ms)
        )
      },
      [options.cancelAtProgress, options.cancelInNode, options.cancelAfterMs],
      { timeout: remaining(), polling: 20 }
    )
    doing = 'pressing Cancel'
    cancelledAt = await page.evaluate(() => performance.now())
    await page
      .getByRole('button', { name: /^(cancel current run|interrupt)$/i })
      .first()
      .click({ timeout: remaining() })
  }

  doing = 'waiting for the end of the prompt'
  await page.waitForFunction(() => window.tpRun.outcome, null, { timeout: remaining(), polling: 50 })
  if ((await page.evaluate(() => window.tpRun.outcome)) === 'success') {
    doing = 'waiting for the images of the prompt'
    await page.waitForFunction(
      () => window.tpShownImages().length >= window.tpRun.outputs && window.tpShownImages().every((i) => i.width > 0),
      null,
      { timeout: Math.min(remaining(), 20000), polling: 50 }
    )
  }
  const watched = await watching
  const record = await page.evaluate((cancelledAt) => {
    const run = window.tpRun
    window.clearInterval(run.timer)
    return {
      outcome: run.outcome,
      promptId: run.promptId,
      error: run.error,
      seconds: (run.ended - run.started) / 1000,
      cancelSeconds: cancelledAt === null ? null : (run.ended - cancelledAt) / 1000,
      progress: run.progress,
      previews: run.previews,
      previewShown: run.previewShown,
      titles: run.titles,
      images: window.tpShownImages()
    }
  }, cancelledAt)
  return { ...record, watched }
}

// Samples the watched expressions until the prompt has ended, once more after that.
async function watchUntilEnd(watch) {
  const watched = Object.fromEntries(Object.keys(watch).map((name) => [name, []]))
  for (let ended = false; !ended; ) {
    ended = await page.evaluate(() => Boolean(window.tpRun.outcome))
    for (const [name, expression] of Object.entries(watch)) {
      const value = await page.evaluate(expression)
      if (JSON.stringify(watched[name].at(-1)) !== JSON.stringify(value)) watched[name].push(value)
    }
    if (!ended) await page.waitForTimeout(100)
  }
  return watched
}

// Runs in the page: keeps the text of every message the page shows, as they vanish after a while.
function recordToasts() {
  const note = () => {
    for (const element of document.querySelectorAll('.p-toast-message, .p-toast-message-content')) {
      const text = element.innerText.trim()
      if (text && !window.tpToasts.includes(text)) window.tpToasts.push(text)
    }
  }
  new MutationObserver(note).observe(document.body, { childList: true, subtree: true, characterData: true })
}

// Runs in the page.
function describeGraph() {
  const nodeTypes = []
  const missingNodeTypes = new Set()
  const visit = (graph) => {
    for (const node of graph.nodes) {
      nodeTypes.push(node.type)
      if (node.subgraph) visit(node.subgraph)
      else if (!LiteGraph.registered_node_types[node.type]) missingNodeTypes.add(node.type)
    }
  }
  visit(window.app.rootGraph ?? window.app.graph)
  return { nodeTypes, missingNodeTypes: [...missingNodeTypes] }
}

// Runs in the page: follows the next prompt by the frontend's own event source.
function recordRun() {
  const api = window.app.api ?? window.comfyAPI.api.api
  const run = {
    started: performance.now(),
    ended: null,
    outcome: null,
    promptId: null,
    error: null,
    progress: [],
    previews: 0,
    previewShown: false,
    outputs: 0,
    showing: new Set(), // nodes that were sent images; others, as LoadImage, show images from the start
    titles: []
  }
  window.tpRun = run
  const allNodes = () => {
    const nodes = []
    const visit = (graph) => {
      for (const node of graph.nodes) {
        nodes.push(node)
        if (node.subgraph) visit(node.subgraph)
      }
    }
    visit(window.app.rootGraph ?? window.app.graph)
    return nodes
  }
  window.tpShownImages = () =>
    allNodes()
      .filter((node) => window.tpRun.showing.has(String(node.id)))
      .filter((node) => node.imgs?.length && node.imgs[0].src.includes('/view?'))
      .flatMap((node) =>
        node.imgs.map((image) => ({
          node: String(node.id),
          type: node.type,
          width: image.naturalWidth,
          height: image.naturalHeight
        }))
      )
  const sample = () => {
    if (!run.titles.includes(document.title)) run.titles.push(document.title)
    if (Object.keys(window.app.nodePreviewImages ?? {}).length > 0) run.previewShown = true
  }
  const end = (outcome, error = null) => {
    if (run.outcome) return
    run.ended = performance.now()
    run.error = error
    sample()
    run.outcome = outcome
  }
  run.timer = window.setInterval(sample, 100)
  api.addEventListener('execution_start', ({ detail }) => (run.promptId ??= detail.prompt_id))
  api.addEventListener('progress', ({ detail }) => {
    const ms = Math.round(performance.now() - run.started)
    run.progress.push({ node: detail.node, value: detail.value, max: detail.max, ms })
  })
  api.addEventListener('b_preview', () => (run.previews += 1))
  api.addEventListener('executed', ({ detail }) => {
    run.outputs += detail.output?.images?.length ?? 0
    if (detail.output?.images?.length) run.showing.add(String(detail.node).split(':').at(-1))
  })
  api.addEventListener('execution_success', () => end('success'))
  api.addEventListener('execution_error', ({ detail }) => end('error', detail))
  api.addEventListener('execution_interrupted', ({ detail }) => end('interrupted', detail))
  const queuePrompt = api.queuePrompt.bind(api)
  api.queuePrompt = async (...args) => {
    try {
      return await queuePrompt(...args)
    } catch (error) {
      end('refused', error.response ?? String(error))
      throw error
    }
  }
}

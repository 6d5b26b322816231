"""A LangGraph graph that branches: after the tool, two nodes ask the model at once, each from the same history."""

import sys
from pathlib import Path

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode


@tool
def write_file(path: str, content: str) -> str:
    """Write a text file in the work directory."""
    Path(path).write_text(content)
    return "written"


model = ChatOpenAI(model="policy").bind_tools([write_file])


def asking(question: str):
    def ask(state: MessagesState) -> MessagesState:
        return {"messages": [model.invoke([*state["messages"], ("user", question)] if question else state["messages"])]}

    return ask


graph = StateGraph(MessagesState)
graph.add_node("model", asking(""))
graph.add_node("tools", ToolNode([write_file]))
graph.add_node("check", asking("Is the file right?"))
graph.add_node("report", asking("What have you done?"))
graph.add_edge(START, "model")
graph.add_edge("model", "tools")
graph.add_edge("tools", "check")
graph.add_edge("tools", "report")
print(graph.compile().invoke({"messages": [("user", sys.argv[1])]})["messages"][-1].content)
